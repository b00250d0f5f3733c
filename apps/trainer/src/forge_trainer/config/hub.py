"""Resolves names of the Hugging Face hub that stand in place of folders. Imports no torch.

`model.from`, `train.init_from` and `data.tokenizer.path` take `hf://owner/name` or
`hf://owner/name@revision`. The files are fetched into the usual cache, once for all ranks of a machine. The
configuration, and so `config.toml` of the run, then names their folder there; its path contains the commit.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from forge_config import ConfigError

NAME = re.compile(r"hf://[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")

CONFIGS = ("config.json", "generation_config.json", "*processor*.json")
WEIGHTS = (*CONFIGS, "*.safetensors", "*.safetensors.index.json")
TOKENIZER = ("*token*.json", "chat_template*", "generation_config.json", "config.json")


def fetch_named(tree: dict[str, Any]) -> None:
    """Replace names by folders of the cache in a configuration that is not decoded yet.

    Raises:
        ConfigError: a repository is neither in the cache nor can it be fetched.
    """
    fetch_shapes(tree)
    train, data = tree.get("train"), tree.get("data")
    if isinstance(train, dict):
        _replace(train, "init_from", WEIGHTS)
        if isinstance(parts := train.get("init_from"), dict):
            for name in parts:
                _replace(parts, name, WEIGHTS)
    tokenizer = data.get("tokenizer") if isinstance(data, dict) else None
    if isinstance(tokenizer, dict) and tokenizer.get("type") == "hf":
        _replace(tokenizer, "path", TOKENIZER)


def fetch_shapes(tree: dict[str, Any]) -> None:
    """Do the same for the shapes of the model alone: fetch neither its weights nor a tokenizer."""
    _in_models(tree.get("model"))


def _in_models(tree: Any) -> None:
    if isinstance(tree, dict):
        _replace(tree, "from", CONFIGS)
        for inner in tree.values():
            _in_models(inner)


def _replace(table: dict[str, Any], key: str, patterns: tuple[str, ...]) -> None:
    given = table.get(key)
    if isinstance(given, str) and NAME.fullmatch(given):
        table[key] = fetched(given, patterns)


def fetched(name: str, patterns: tuple[str, ...]) -> str:
    """Return the folder of the cache with the files of a model; fetch missing files.

    Raises:
        ConfigError: the files cannot be fetched; the message lists the content of the cache.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"{name} is fetched by a library that is missing: pip install huggingface_hub"
        ) from None
    repository, _, revision = name.removeprefix("hf://").partition("@")
    try:
        folder = snapshot_download(repository, revision=revision or None, allow_patterns=list(patterns))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name} is not in the cache, and cannot be fetched from the Hugging Face hub: "
            f"{str(error).strip().splitlines()[0]} In the cache are: {', '.join(_cached()) or 'no models'}"
        ) from None
    sys.stderr.write(f"{name}: commit {Path(folder).name[:12]} of the Hugging Face hub\n")
    return folder


def _cached() -> list[str]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return sorted(one.repo_id for one in scan_cache_dir().repos if one.repo_type == "model")
    except CacheNotFound:
        return []
