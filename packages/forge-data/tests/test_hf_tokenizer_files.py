"""Tokenizers in the words of Hugging Face, against ours."""

import random

import pytest
from forge_data.tokenizer.hf import HfTokenizerConfig
from forge_data.tokenizer.tokenizer import BytesConfig

tokenizers = pytest.importorskip("tokenizers")


def test_bytes_read_by_tokenizers_are_our_ids():
    files = BytesConfig().hf_files(128)
    theirs, ours = tokenizers.Tokenizer.from_str(files["tokenizer.json"]), BytesConfig().build()
    draw = random.Random(0)
    points = [*range(0xD800), *range(0x1F600, 0x1F650)]
    for _ in range(50):
        text = "".join(chr(draw.choice(points)) for _ in range(20)) + " x\n\t  y"
        assert theirs.encode(text).ids == ours.encode(text).tolist()
        assert theirs.decode(ours.encode(text).tolist()) == text
    assert theirs.encode("<|endoftext|>").ids == [ours.eos_id]
    assert theirs.get_vocab_size() == ours.vocab_size
    # every byte, also those that are in no text
    assert sorted(theirs.get_vocab().values()) == list(range(257))


def test_files_beside_a_tokenizer_go_along(tmp_path):
    text = BytesConfig().hf_files(128)["tokenizer.json"]
    (tmp_path / "tokenizer.json").write_text(text)
    config = HfTokenizerConfig(path=str(tmp_path), eos="<|endoftext|>")
    made = config.hf_files(128)
    assert made["tokenizer.json"] == text and '"eos_token": "<|endoftext|>"' in made["tokenizer_config.json"]
    (tmp_path / "tokenizer_config.json").write_text('{"chat": 1}')
    (tmp_path / "notes.txt").write_text("not ours")
    assert config.hf_files(128) == {"tokenizer.json": text, "tokenizer_config.json": '{"chat": 1}'}
