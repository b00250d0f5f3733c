"""How text becomes token ids and back. Imports no torch."""

from __future__ import annotations

import hashlib
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
        from forge_data.hf_tokenizer_files import byte_files

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
        from forge_data.hf_tokenizer_files import copied_files

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
        self._inner: Any = Rust.from_file(str(file))
        eos_id = self._inner.token_to_id(eos)
        if eos_id is None:
            raise DataError(f"{file} has no token {eos!r}; name its end-of-document token with tokenizer.eos")
        self.eos_id: int = eos_id
        self.vocab_size: int = self._inner.get_vocab_size(with_added_tokens=True)
        self.digest = hashlib.blake2b(file.read_bytes() + eos.encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer.encode`."""
        return np.asarray(self._inner.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, tokens: list[int]) -> str:
        """See `Tokenizer.decode`."""
        return self._inner.decode(tokens, skip_special_tokens=True)


def _file(path: str) -> Path:
    return Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
