"""How text becomes token ids and back. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from forge_config import Config, Registry

from forge_data.tokenizer.chat import ChatTemplate

END_OF_TEXT = "<|endoftext|>"
"""How the id that ends a document is spelled, where ids are bytes."""


class Tokenizer(Protocol):
    """Text to ids and back.

    A tokenizer of another project may lack the attributes after `digest`; code that reads them uses defaults.

    Attributes:
        vocab_size: ids are below this.
        eos_id: ends a document.
        digest: names the tokenizer in manifests.
        file_digest: digest of its file; files that differ may define the same tokenizer.
        bos_ids: begin each document and each prompt; often none.
        control_tokens: texts that are control tokens wherever they are spelled.
        stop_ids: ids that end generated text; `eos_id` is one of them.
        chat_template: formats conversations.
    """

    vocab_size: int
    eos_id: int
    digest: str
    bos_ids: tuple[int, ...]
    control_tokens: tuple[str, ...]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """See above."""
        ...

    @property
    def chat_template(self) -> ChatTemplate | None:
        """See above."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, without an end-of-document token."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids; special ids are left out."""
        ...

    def spell(self, tokens: list[int]) -> str:
        """The text of token ids, also of special ids."""
        ...

    def encode_places(self, text: str, spelled: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of `encode`, and the characters they come from.

        Args:
            text: encoded as a whole.
            spelled: positions of characters; a control token that contains one of them is encoded as text.

        Returns:
            [n] ids, and [n, 2] int64, the first character of each and the one after its last.
        """
        ...

    def token_bytes(self) -> np.ndarray | None:
        """[vocab_size] int64: bytes of text that each id stands for, 0 for special ids; None if not known."""
        ...


def with_bos(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text after `bos_ids`, unless the text begins with them itself."""
    ids, bos = [int(token) for token in tokenizer.encode(text)], list(getattr(tokenizer, "bos_ids", ()))
    return ids if ids[: len(bos)] == bos else bos + ids


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end a generated text."""
    return getattr(tokenizer, "stop_ids", (tokenizer.eos_id,))


def file_digest(tokenizer: Tokenizer) -> str:
    """Digest of the tokenizer's files; caches and streams are named by it."""
    return getattr(tokenizer, "file_digest", tokenizer.digest)


def is_named(tokenizer: Tokenizer, digest: str) -> bool:
    """Whether a manifest names this tokenizer; older manifests name its file."""
    return digest in (tokenizer.digest, file_digest(tokenizer))


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
        """Return files by name that `transformers.AutoTokenizer` loads; none if it has no such form.

        Args:
            max_tokens: longest sequence of the model.
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
    bos_ids: tuple[int, ...] = ()
    control_tokens: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = (256,)
    chat_template = None

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer.encode`."""
        return np.frombuffer(text.encode("utf-8", errors="surrogatepass"), dtype=np.uint8)

    def spell(self, tokens: list[int]) -> str:
        """See `Tokenizer.spell`."""
        raw = b"".join(bytes([one]) if one < 256 else END_OF_TEXT.encode() for one in tokens)
        return raw.decode("utf-8", errors="replace")

    def encode_places(self, text: str, spelled: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """See `Tokenizer.encode_places`."""
        starts = np.repeat(np.arange(len(text)), [len(c.encode("utf-8", "surrogatepass")) for c in text])
        return self.encode(text), np.stack([starts, starts + 1], axis=1)

    def decode(self, tokens: list[int]) -> str:
        """See `Tokenizer.decode`; bytes that are no UTF-8 become replacement characters."""
        return bytes(t for t in tokens if t < 256).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """See `Tokenizer.token_bytes`."""
        return (np.arange(self.vocab_size) != self.eos_id).astype(np.int64)
