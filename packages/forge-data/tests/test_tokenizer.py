import sys
from pathlib import Path

import numpy as np
import pytest
from forge_data.error import DataError
from forge_data.tokenizer import BytesConfig, HfTokenizerConfig


@pytest.mark.parametrize("text", ["", "plain", "naïve 東京 🙂", "\x00\n"])
def test_bytes_decode_what_they_encode(text: str) -> None:
    tokenizer = BytesConfig().build()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids.tolist(), tokenizer.eos_id]) == text


def test_bytes_decode_half_a_character_as_a_replacement() -> None:
    assert BytesConfig().build().decode([0xC3, 97, 0xFF]) == "\ufffda\ufffd"


def test_bytes_have_one_id_more_than_bytes() -> None:
    assert (BytesConfig().vocab_size, BytesConfig().build().eos_id) == (257, 256)


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["def one(): return two"] * 10, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_hf_decodes_what_it_encodes(tokenizer_file: Path) -> None:
    config = HfTokenizerConfig(path=str(tokenizer_file))
    tokenizer = config.build()
    text = "def one(): return naïve"
    ids = tokenizer.encode(text)
    assert isinstance(ids, np.ndarray)
    assert len(ids) < len(text.encode())
    assert ids.max() < config.vocab_size
    assert tokenizer.decode([*ids.tolist(), tokenizer.eos_id]) == text


def test_hf_takes_the_folder_of_the_file(tokenizer_file: Path) -> None:
    of_file, of_folder = (
        HfTokenizerConfig(path=str(p)).build() for p in (tokenizer_file, tokenizer_file.parent)
    )
    assert (
        of_file.digest
        == of_folder.digest
        != HfTokenizerConfig(path=str(tokenizer_file), eos="d").build().digest
    )


def test_hf_names_a_token_that_is_missing(tokenizer_file: Path) -> None:
    with pytest.raises(DataError, match="<eos>"):
        HfTokenizerConfig(path=str(tokenizer_file), eos="<eos>").build()


def test_hf_names_a_file_that_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        HfTokenizerConfig(path=str(tmp_path / "tokenizer.json")).build()


def test_hf_names_the_extra_when_tokenizers_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"forge-data\[tokenizers\]"):
        HfTokenizerConfig(path="x").build()
