import json
import sys
from pathlib import Path

import numpy as np
import pytest
from forge_data.error import DataError
from forge_data.store.tokenize import tokenize_files
from forge_data.tokenizer.hf import HfTokenizerConfig
from forge_data.tokenizer.tokenizer import BytesConfig, is_named


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


def test_hf_names_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    for content in ("", "{}", "no JSON"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(DataError, match=r"tokenizer.json is no tokenizer.json that can be read"):
            HfTokenizerConfig(path=str(tmp_path)).build()


def test_hf_reads_documents_to_their_end_whatever_length_the_file_was_saved_for(tokenizer_file: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    whole = HfTokenizerConfig(path=str(tokenizer_file)).build()
    made = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    for enable in (lambda: made.enable_truncation(4), lambda: made.enable_padding(length=64)):
        enable()
        made.save(str(tokenizer_file))
        tokenizer = HfTokenizerConfig(path=str(tokenizer_file)).build()
        assert tokenizer.encode(TEXT * 3).tolist() == whole.encode(TEXT * 3).tolist()
        assert tokenizer.digest != whole.digest


def test_file_that_is_saved_otherwise_is_the_same_tokenizer(tokenizer_file: Path, tmp_path: Path) -> None:
    """As other versions of libraries save it; a store that names the file as it was is still its own."""
    before = HfTokenizerConfig(path=str(tokenizer_file)).build()
    tree = json.loads(tokenizer_file.read_text())
    if "merges" in tree["model"]:
        tree["model"]["merges"] = [
            " ".join(one) if isinstance(one, list) else one.split(" ") for one in tree["model"]["merges"]
        ]
    tokenizer_file.write_text(json.dumps(dict(reversed(tree.items())), indent=7))
    after = HfTokenizerConfig(path=str(tokenizer_file)).build()
    assert after.digest == before.digest and after.file_digest != before.file_digest
    assert is_named(before, before.file_digest) and is_named(after, before.digest)
    assert not is_named(after, before.file_digest)
    ids = tree["model"]["vocab"]
    first, *_, last = ids
    ids[first], ids[last] = ids[last], ids[first]
    tokenizer_file.write_text(json.dumps(tree))
    assert HfTokenizerConfig(path=str(tokenizer_file)).build().digest != before.digest


def word_tokenizer(folder: Path, vocab: dict[str, int]) -> HfTokenizerConfig:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    return HfTokenizerConfig(path=str(folder))


def test_hf_keeps_ids_whose_numbers_have_gaps(tmp_path: Path) -> None:
    """Three tokens, one of which does not fit into 16 bits."""
    config = word_tokenizer(tmp_path, {"a": 0, "b": 70_000, "</s>": 2})
    (tmp_path / "x.txt").write_text("a b b a")
    store = tokenize_files([tmp_path / "x.txt"], tmp_path / "s", config, root=tmp_path)
    assert store.read(np.asarray([0]), 5).tolist() == [[0, 70_000, 70_000, 0, 2]]
    assert config.vocab_size == store.manifest.vocab_size == 70_001


def test_hf_names_text_that_the_vocabulary_lacks(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(tmp_path, {"a": 0, "</s>": 2}).build()
    with pytest.raises(DataError, match=r"cannot encode 'a other'"):
        tokenizer.encode("a other")


def test_hf_names_the_extra_when_tokenizers_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"forge-data\[tokenizers\]"):
        HfTokenizerConfig(path="x").build()


TEXT = "def one(): return na\u00efve \u6771\u4eac \U0001f642\n"


def test_bytes_of_tokens_are_those_of_the_text(tokenizer_file: Path) -> None:
    for config in (BytesConfig(), HfTokenizerConfig(path=str(tokenizer_file))):
        tokenizer = config.build()
        lengths = tokenizer.token_bytes()
        assert lengths is not None and len(lengths) == config.vocab_size
        assert lengths[tokenizer.encode(TEXT)].sum() == len(TEXT.encode())
        assert lengths[tokenizer.eos_id] == 0


def made_tokenizer(folder: Path, vocab: dict[str, int], decoder: str) -> HfTokenizerConfig:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    made.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    made.decoder = getattr(tokenizers.decoders, decoder)()
    made.add_special_tokens(["</s>"])
    made.add_tokens(["\u00e9\u00e9"])
    made.save(str(folder / "tokenizer.json"))
    return HfTokenizerConfig(path=str(folder))


def test_bytes_of_sentencepiece_tokens_are_those_of_the_text(tmp_path: Path) -> None:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "\u2581": 257, "\u6771": 258}
    tokenizer = made_tokenizer(tmp_path, vocab, "ByteFallback").build()
    lengths, text = tokenizer.token_bytes(), "a \u6771 \u00e9\u00e9 \U0001f642"
    assert lengths is not None and lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_bytes_of_tokens_are_not_guessed(tmp_path: Path) -> None:
    assert made_tokenizer(tmp_path, {"a": 0}, "WordPiece").build().token_bytes() is None
