"""A tokenizer from a `tokenizer.json` and the files beside it. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forge_data.error import DataError
from forge_data.tokenizer.chat import ChatTemplate, chat_template_beside, read_json, special_tokens_beside
from forge_data.tokenizer.tokenizer import TokenizerConfig, tokenizers

AddsBos = bool | Literal["auto"]


@tokenizers.register("hf")
class HfTokenizerConfig(TokenizerConfig):
    """A Hugging Face `tokenizer.json`.

    Attributes:
        path: the file, or its folder.
        eos: the token that ends a document.
        bos: whether a token begins each document and each prompt. `auto` does what the post-processor of the
            tokenizer does, as `transformers`; true takes `bos_token` of `tokenizer_config.json` where the
            post-processor adds none.
    """

    # Another token at the beginning makes other tokens, which the fingerprint of the content notices.
    free_keys = ("path", "bos")
    path_keys = ("path",)

    path: str
    eos: str = "</s>"
    bos: AddsBos = "auto"

    @property
    def vocab_size(self) -> int:
        """See `TokenizerConfig.vocab_size`."""
        return self.build().vocab_size

    def build(self) -> HfTokenizer:
        """See `TokenizerConfig.build`.

        Raises:
            DataError: no such file, or no such token.
        """
        return HfTokenizer(self.path, self.eos, self.bos)

    def hf_files(self, max_tokens: int) -> dict[str, str]:
        """See `TokenizerConfig.hf_files`."""
        from forge_data.tokenizer.hf_files import copied_files

        return copied_files(_file(self.path), self.eos, max_tokens, self.build())


class HfTokenizer:
    """A Hugging Face `tokenizer.json`.

    Attributes:
        folder: its folder, perhaps with other files of a model.
        num_entries: size of its vocabulary; below `vocab_size` where ids have gaps.
    """

    def __init__(self, path: str, eos: str, bos: AddsBos = "auto") -> None:
        try:
            from tokenizers import Tokenizer as Rust
        except ImportError:
            raise DataError("tokenizer type 'hf' needs: pip install 'forge-data[tokenizers]'") from None
        file = _file(path)
        if not file.is_file():
            raise DataError(f"there is no tokenizer at {file}")
        try:
            self._rust: Any = Rust.from_file(str(file))
        except Exception as error:  # the Rust library knows no other class
            raise DataError(f"{file} is no tokenizer.json that can be read: {error}") from None
        self.folder = file.parent
        self.eos_id: int = self._id(eos, "name its end-of-document token with tokenizer.eos")
        # Ids may have gaps, so that there are fewer tokens than the largest id says.
        ids = self._rust.get_vocab(with_added_tokens=True).values()
        self.vocab_size: int = max(ids) + 1
        self.num_entries = len(ids)
        raw, named = file.read_bytes(), eos.encode()
        if self._rust.truncation is not None or self._rust.padding is not None:
            # Such files were saved for batches of a fixed length; here every document is read to its end.
            self._rust.no_truncation()
            self._rust.no_padding()
            named += b"/whole"
        self.bos_ids: tuple[int, ...] = self._bos(bos)
        if self.bos_ids:
            named += f"/bos {self.bos_ids}".encode()
        self.digest = hashlib.blake2b(_content(raw) + named, digest_size=16).hexdigest()
        self.file_digest = hashlib.blake2b(raw + named, digest_size=16).hexdigest()
        added = self._rust.get_added_tokens_decoder()
        self._control_ids = {number for number, token in added.items() if token.special}
        self.control_tokens: tuple[str, ...] = tuple(t.content for t in added.values() if t.special)
        # It would take spaces out of the places of tokens; the ids are the same without it.
        self._inner: Any = Rust.from_str(self._rust.to_str())
        self._inner.post_processor = None

    def _id(self, token: str, advice: str) -> int:
        found = self._rust.token_to_id(token)
        if found is None:
            raise DataError(f"{_file(str(self.folder))} has no token {token!r}; {advice}")
        return found

    def _bos(self, bos: AddsBos) -> tuple[int, ...]:
        """The ids that begin a document."""
        if bos == "auto":
            return self.added[0]
        if not bos:
            return ()
        token = self.named_ids.get("bos_token")
        if not self.added[0] and token is None:
            raise DataError(
                f"given bos = true, and neither the post-processor of {_file(str(self.folder))} nor "
                "`bos_token` of a tokenizer_config.json beside it says which token that is; name it there"
            )
        return self.added[0] or (self.named_ids["bos_token"],)

    @cached_property
    def named_ids(self) -> dict[str, int]:
        """Return the ids of the special tokens that the files beside it name, such as `bos_token`."""
        found = special_tokens_beside(self.folder).items()
        ids = {name: self._rust.token_to_id(text) for name, text in found}
        return {name: number for name, number in ids.items() if number is not None}

    @cached_property
    def added(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the post-processor puts before and after a text."""
        if self._rust.post_processor is None:
            return (), ()
        for text in ("a", *self._rust.get_vocab(with_added_tokens=False)):
            try:
                core = self._rust.encode(text, add_special_tokens=False).ids
            except Exception:  # it cannot encode this one; the Rust library knows no other class
                continue
            if core:
                ids = self._rust.encode(text, add_special_tokens=True).ids
                at = next(n for n in range(len(ids)) if ids[n : n + len(core)] == core)
                return tuple(ids[:at]), tuple(ids[at + len(core) :])
        return (), ()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """See `Tokenizer.stop_ids`: `eos`, `eos_token`, and the ids in `generation_config.json`."""
        ids = eos_ids(generation_beside(self.folder))
        named = [self.named_ids[name] for name in ("eos_token",) if name in self.named_ids]
        return tuple(dict.fromkeys([self.eos_id, *ids, *named]))

    @property
    def chat_template(self) -> ChatTemplate | None:
        """See `Tokenizer.chat_template`."""
        return self._chat_template

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        return chat_template_beside(self.folder)

    def text_of(self, number: int) -> str:
        """The text of a special token."""
        return self._rust.id_to_token(number)

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer.encode`.

        Raises:
            DataError: the vocabulary lacks a part of the text, and a token for unknown text.
        """
        return np.asarray(self._encoded(self._inner, text).ids, dtype=np.int64)

    def encode_places(self, text: str, spelled: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer.encode_places`.

        Raises:
            DataError: as in `encode`.
        """
        ids, places = self._placed(self._inner, text)
        control = [n for n in np.flatnonzero(np.isin(ids, list(self._control_ids))).tolist() if len(spelled)]
        meant = [n for n in control if not any(places[n, 0] <= at < places[n, 1] for at in spelled)]
        if meant == control:
            return ids, places
        # The tokenizer cuts a text at its control tokens first; here it is cut at those that are meant.
        found, start = list[tuple[np.ndarray, np.ndarray]](), 0
        for n in [*meant, None]:
            a, b = (len(text), len(text)) if n is None else places[n].tolist()
            inner = self._of_text[min(start, 1)]
            between, where = self._placed(inner, text[start:a])
            found.append((between, where + start))
            found += [] if n is None else [(ids[n : n + 1], places[n : n + 1])]
            start = b
        all_ids, all_places = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        return all_ids, all_places

    @cached_property
    def _of_text(self) -> tuple[Any, Any]:
        """Tokenizers without control tokens: one for the beginning of a text, one for later text."""
        original = self._inner.to_str()
        later = json.loads(original)
        split = later.get("pre_tokenizer") or {}
        for part in split.get("pretokenizers", [split]):
            if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first":
                part["prepend_scheme"] = "never"
        both = [type(self._inner).from_str(text) for text in (original, json.dumps(later))]
        for inner in both:
            inner.encode_special_tokens = True
        return both[0], both[1]

    def _placed(self, inner: Any, text: str) -> tuple[np.ndarray, np.ndarray]:
        found = self._encoded(inner, text)
        return np.asarray(found.ids, dtype=np.int64), np.asarray(found.offsets, np.int64).reshape(-1, 2)

    def _encoded(self, inner: Any, text: str) -> Any:
        try:
            return inner.encode(text, add_special_tokens=False)
        except Exception as error:  # as above
            raise DataError(f"the tokenizer cannot encode {text[:40]!r}...: {error}") from None

    def decode(self, tokens: list[int]) -> str:
        """See `Tokenizer.decode`."""
        return self._inner.decode(tokens, skip_special_tokens=True)

    def spell(self, tokens: list[int]) -> str:
        """See `Tokenizer.spell`."""
        return self._inner.decode(tokens, skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray | None:
        """See `Tokenizer.token_bytes`; known for byte-level BPE and for SentencePiece.

        It counts normalized text: SentencePiece may have put a space before it.
        """
        description = json.loads(self._inner.to_str())
        decoder = description.get("decoder") or {}
        kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
        if "ByteLevel" in kinds:
            length = len  # each letter stands for one byte
        elif kinds & {"ByteFallback", "Metaspace"}:
            length = _sentencepiece_length
        else:
            return None
        found = np.zeros(self.vocab_size, dtype=np.int64)
        for token, index in self._inner.get_vocab(with_added_tokens=False).items():
            found[index] = length(token)
        for added in description["added_tokens"]:
            found[added["id"]] = 0 if added["special"] else len(added["content"].encode())
        found[self.eos_id] = 0
        return found


def _sentencepiece_length(token: str) -> int:
    """Return the bytes of a token; `<0x0A>` is one byte, and `\u2581` stands for a space."""
    return 1 if re.fullmatch("<0x[0-9A-F]{2}>", token) else len(token.replace("\u2581", " ").encode())


def _file(path: str) -> Path:
    return Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)


def generation_beside(folder: Path) -> dict[str, Any]:
    """Return the generation settings of a model folder: `generation_config.json`, or ids of `config.json`."""
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    of_model = {name: value for name, value in read_json(folder / "config.json").items() if name in ids}
    return read_json(folder / "generation_config.json") or of_model


def eos_ids(generation: Mapping[str, Any]) -> list[int]:
    """Return the ids that end a text, from a `generation_config.json`, which may hold one or several."""
    ids = generation.get("eos_token_id")
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _content(raw: bytes) -> bytes:
    """Return the content of a `tokenizer.json` in one form: versions of the library save it differently."""
    tree = json.loads(raw)
    for outside in ("truncation", "padding"):
        tree.pop(outside, None)
    model = tree.get("model") or {}
    if isinstance(merges := model.get("merges"), list):
        model["merges"] = [one.split(" ") if isinstance(one, str) else one for one in merges]
    if isinstance(added := tree.get("added_tokens"), list):
        tree["added_tokens"] = sorted(added, key=lambda token: token.get("id", -1))
    return json.dumps(tree, sort_keys=True).encode()
