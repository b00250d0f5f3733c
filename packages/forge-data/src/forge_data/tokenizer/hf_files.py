"""The files that `transformers.AutoTokenizer` loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_data.tokenizer.tokenizer import END_OF_TEXT

if TYPE_CHECKING:
    from forge_data.tokenizer.hf import HfTokenizer

TAKEN_OVER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""What may lie beside a `tokenizer.json`."""


def byte_files(eos_id: int, max_tokens: int) -> dict[str, str]:
    """A byte-level BPE without merges: each byte is its own id."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": eos_id, "content": END_OF_TEXT} | end],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(_letters())},
            "merges": [],
        },
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False) + "\n",
        "tokenizer_config.json": _config(END_OF_TEXT, max_tokens),
    }


def copied_files(file: Path, eos: str, max_tokens: int, tokenizer: HfTokenizer) -> dict[str, str]:
    """Return the files of a tokenizer folder: `tokenizer.json` and its companions.

    If the run begins its documents with other tokens than the post-processor, or the post-processor appends a
    token, another post-processor replaces it, which does the same as the run.

    Args:
        file: the `tokenizer.json`.
        eos: the end-of-document token of the run.
        max_tokens: longest sequence of the model.
        tokenizer: the tokenizer of the run.
    """
    found = {"tokenizer_config.json": _config(eos, max_tokens)}
    beside = (file.with_name(name) for name in TAKEN_OVER)
    found |= {path.name: path.read_text(encoding="utf-8") for path in beside if path.is_file()}
    text, bos = file.read_text(encoding="utf-8"), tokenizer.bos_ids
    if tokenizer.added != (bos, ()):
        changed = json.loads(text) | {
            "post_processor": _beginning({tokenizer.text_of(one): one for one in bos})
        }
        text = json.dumps(changed, ensure_ascii=False) + "\n"
    return found | {"tokenizer.json": text}


def _beginning(bos: dict[str, int]) -> dict[str, Any]:
    """Return a post-processor that puts tokens before a text, as JSON."""
    single = [{"SpecialToken": {"id": text, "type_id": 0}} for text in bos]
    single += [{"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {text: {"id": text, "ids": [one], "tokens": [text]} for text, one in bos.items()},
    }


def _config(eos: str, max_tokens: int) -> str:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
    }
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def _letters() -> list[str]:
    """Return the printable letter for each byte (GPT-2, openai/gpt-2 encoder.py `bytes_to_unicode`)."""
    themselves = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in themselves else next(others)) for byte in range(256)]
