"""How text becomes token ids and back. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from forge_config import Config, Registry

from forge_data.error import DataError


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        vocab_size: ids are below this.
        eos_id: ends a document.
        digest: names the tokenizer in manifests.
    """

    vocab_size: int
    eos_id: int
    digest: str

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, without an end-of-document token."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids; special ids are left out."""
        ...

    def token_bytes(self) -> np.ndarray | None:
        """[vocab_size] int64: bytes of text that each id stands for, 0 for special ids; None if not known."""
        ...


class TokenizerConfig(Config):
    """Interface of `[data.tokenizer]`."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        raise NotImplementedError

    def build(self) -> Tokenizer:
        """The tokenizer."""
        raise NotImplementedError

    def hf_files(self, max_tokens: int) -> dict[str, str]:
        """Files by name that `transformers.AutoTokenizer` loads; none if it cannot be said in its terms.

        Args:
            max_tokens: of the model.
        """
        return {}


tokenizers = Registry("tokenizer", TokenizerConfig, default="bytes")


@tokenizers.register("bytes")
class BytesConfig(TokenizerConfig):
    """UTF-8 bytes, and one id that ends a document."""

    @property
    def vocab_size(self) -> int:
        """See `TokenizerConfig.vocab_size`."""
        return 257

    def build(self) -> Tokenizer:
        """See `TokenizerConfig.build`."""
        return Bytes()

    def hf_files(self, max_tokens: int) -> dict[str, str]:
        """See `TokenizerConfig.hf_files`."""
        from forge_data.tokenizer.hf_files import byte_files

        return byte_files(Bytes.eos_id, max_tokens)


class Bytes:
    """UTF-8 bytes; 256 ends a document."""

    vocab_size = 257
    eos_id = 256
    digest = "bytes-256"

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer.encode`."""
        return np.frombuffer(text.encode("utf-8", errors="surrogatepass"), dtype=np.uint8)

    def decode(self, tokens: list[int]) -> str:
        """See `Tokenizer.decode`; bytes that are no UTF-8 become replacement characters."""
        return bytes(t for t in tokens if t < 256).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """See `Tokenizer.token_bytes`."""
        return (np.arange(self.vocab_size) != self.eos_id).astype(np.int64)


@tokenizers.register("hf")
class HfTokenizerConfig(TokenizerConfig):
    """A Hugging Face `tokenizer.json`.

    Attributes:
        path: the file, or the folder it is in.
        eos: the token that ends a document.
    """

    free_keys = path_keys = ("path",)

    path: str
    eos: str = "</s>"

    @property
    def vocab_size(self) -> int:
        """See `TokenizerConfig.vocab_size`."""
        return self.build().vocab_size

    def build(self) -> Tokenizer:
        """See `TokenizerConfig.build`.

        Raises:
            DataError: no such file, or no such token.
        """
        return HfTokenizer(self.path, self.eos)

    def hf_files(self, max_tokens: int) -> dict[str, str]:
        """See `TokenizerConfig.hf_files`."""
        from forge_data.tokenizer.hf_files import copied_files

        return copied_files(_file(self.path), self.eos, max_tokens)


class HfTokenizer:
    """A Hugging Face `tokenizer.json`."""

    def __init__(self, path: str, eos: str) -> None:
        try:
            from tokenizers import Tokenizer as Rust
        except ImportError:
            raise DataError("tokenizer type 'hf' needs: pip install 'forge-data[tokenizers]'") from None
        file = _file(path)
        if not file.is_file():
            raise DataError(f"there is no tokenizer at {file}")
        try:
            self._inner: Any = Rust.from_file(str(file))
        except Exception as error:  # the Rust library knows no other class
            raise DataError(f"{file} is no tokenizer.json that can be read: {error}") from None
        eos_id = self._inner.token_to_id(eos)
        if eos_id is None:
            raise DataError(f"{file} has no token {eos!r}; name its end-of-document token with tokenizer.eos")
        self.eos_id: int = eos_id
        # Ids may have gaps, so that there are fewer tokens than the largest id says.
        self.vocab_size: int = max(self._inner.get_vocab(with_added_tokens=True).values()) + 1
        named = file.read_bytes() + eos.encode()
        if self._inner.truncation is not None or self._inner.padding is not None:
            # Such files were saved for batches of a fixed length; here every document is read to its end.
            self._inner.no_truncation()
            self._inner.no_padding()
            named += b"/whole"
        self.digest = hashlib.blake2b(named, digest_size=16).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer.encode`.

        Raises:
            DataError: the vocabulary lacks a part of the text, and a token for what is unknown.
        """
        try:
            ids = self._inner.encode(text, add_special_tokens=False).ids
        except Exception as error:  # as above
            raise DataError(f"the tokenizer cannot encode {text[:40]!r}...: {error}") from None
        return np.asarray(ids, dtype=np.int64)

    def decode(self, tokens: list[int]) -> str:
        """See `Tokenizer.decode`."""
        return self._inner.decode(tokens, skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray | None:
        """See `Tokenizer.token_bytes`; known of byte-level BPE and of SentencePiece.

        Counted is the text that the tokenizer has normalized: SentencePiece may have put a space before it.
        """
        said = json.loads(self._inner.to_str())
        decoder = said.get("decoder") or {}
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
        for added in said["added_tokens"]:
            found[added["id"]] = 0 if added["special"] else len(added["content"].encode())
        found[self.eos_id] = 0
        return found


def _sentencepiece_length(token: str) -> int:
    """Bytes of a token, of which `<0x0A>` is one, and `\u2581` stands for a space."""
    return 1 if re.fullmatch("<0x[0-9A-F]{2}>", token) else len(token.replace("\u2581", " ").encode())


def _file(path: str) -> Path:
    return Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
