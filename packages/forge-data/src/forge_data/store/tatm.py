"""Folders of raw tokens described by a `metadata.yaml` or `metadata.json`, as tatm writes them.

Source: tatm (KempnerInstitute) `tokenizer/metadata.py`, `tokenizer/engine.py` and `data/metadata.py`;
KempnerForge reads the same folders.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from forge_data.error import DataError
from forge_data.store.chunks import Chunk
from forge_data.store.tokens import CHUNK
from forge_data.tokenizer.tokenizer import Tokenizer

NAMES = ("metadata.json", "metadata.yaml", "metadata.yml")
SECTION = "tokenized_info"


def metadata_of(folder: Path) -> Path | None:
    """Return the file that describes the tokens of a folder; None if there is none."""
    return next((folder / name for name in NAMES if (folder / name).is_file()), None)


def read_tatm(
    metadata: Path, tokenizer: Tokenizer, dtype: str | None, open_file: Callable[[Path, str], Any]
) -> Iterator[Chunk]:
    """Read the files that a metadata file describes, in the order of their names, without zeros at the end.

    tatm reserves each file in full before it writes tokens, so that its unused part stays zero.

    Args:
        metadata: the metadata file.
        tokenizer: the tokenizer that the user states.
        dtype: stated by the user; must not contradict the file.
        open_file: opens a token file of a dtype (`read_foreign`).

    Raises:
        DataError: it says too little, contradicts the user, or names files that are not there.
    """
    section = _section(metadata)
    stated = section.get("dtype", "uint16")
    if stated not in ("uint16", "uint32"):
        raise DataError(f"{metadata}: {SECTION}.dtype = {stated!r}; expected uint16 or uint32")
    if dtype not in (None, stated):
        raise DataError(f"{metadata} says dtype {stated}; given --dtype {dtype}: leave it out")
    size = section.get("vocab_size")
    entries = getattr(tokenizer, "num_entries", tokenizer.vocab_size)
    if size is not None and str(size) != str(entries):
        raise DataError(
            f"{metadata} says vocab_size {size} of tokenizer {section.get('tokenizer', '(unnamed)')}; given "
            f"a tokenizer of {entries}: name --tokenizer {metadata.parent / 'tokenizer.json'}, "
            "which tatm writes beside the tokens, or that of the tokens"
        )
    for path in _files(metadata, section):
        tokens = open_file(path, stated).tokens
        end = min(len(tokens), _filled(path, tokens) + (tokenizer.eos_id == 0))
        if end < len(tokens):
            sys.stderr.write(f"{path}: {len(tokens) - end:,} zeros at its end are left out\n")
        yield Chunk(path, tokens[:end], None)


def _files(metadata: Path, section: dict[str, Any]) -> list[Path]:
    """Return the token files. Only the last part of the recorded prefix counts: the folder may have moved."""
    prefix, ending = Path(str(section.get("file_prefix") or "")).name, section.get("file_extension")
    for kind in (ending,) if ending else ("bin", "npy"):
        if files := sorted(metadata.parent.glob(f"{prefix}*.{kind}")):
            return files
    raise DataError(
        f"{metadata} describes files {prefix}*.{ending or 'bin'}; there are none in {metadata.parent}: copy "
        "them beside it"
    )


def _filled(path: Path, tokens: np.ndarray) -> int:
    """Return the number of tokens up to the last that is not zero."""
    end = len(tokens)
    while end and not tokens[max(0, end - CHUNK) : end].any():
        end = max(0, end - CHUNK)
    if not end:
        raise DataError(f"{path} holds zeros only: its writer was killed; remove it")
    start = max(0, end - CHUNK)
    return start + int(np.flatnonzero(tokens[start:end])[-1]) + 1


def _section(metadata: Path) -> dict[str, Any]:
    try:
        text = metadata.read_text(encoding="utf-8")
        section = (
            json.loads(text).get(SECTION) if metadata.suffix == ".json" else _yaml_section(metadata, text)
        )
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{metadata} cannot be read: {error}") from None
    if not isinstance(section, dict):
        raise DataError(
            f"{metadata} has no {SECTION}, so its files hold no tokens: `forge-data tokenize` reads text"
        )
    return section


def _yaml_section(metadata: Path, text: str) -> dict[str, str] | None:
    """Return the keys of one section: a plain value a line, as tatm writes them."""
    lines = text.splitlines()
    begin = next((row for row, line in enumerate(lines) if line.startswith(f"{SECTION}:")), None)
    if begin is None:
        return None
    found: dict[str, str] = {}
    rest = lines[begin][len(SECTION) + 1 :].partition("#")[0].strip()
    for row, line in [(begin, rest), *enumerate(lines[begin + 1 :], begin + 1)]:
        if row > begin and line and line[0] not in " #":
            break
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        pair = re.fullmatch(r" +(\w+): *('[^']*'|\"[^\"\\]*\"|[^'\"{\[&*|>#\s][^#]*|)(?: +#.*)?\s*", line)
        if pair is None:
            raise DataError(f"{metadata}:{row + 1}: {line.strip()!r}; expected `key: value`, one a line")
        value = pair[2].strip()
        quoted = len(value) > 1 and value[0] in "'\""
        if quoted or value not in ("", "null", "~"):
            found[pair[1]] = value[1:-1] if quoted else value
    return found
