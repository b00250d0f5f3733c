"""`forge generate`: what prompts may look like, and that a batch changes no answer."""

import json
import subprocess
import sys
from argparse import Namespace

import pytest
from forge_config import ConfigError
from forge_data.tokenizer.tokenizer import Bytes
from forge_model import DecoderConfig, ModelError, initialize
from forge_model.config import GroupedQueryConfig
from forge_trainer.cli import main
from forge_trainer.commands.generate import Asked, Writer, read_prompts

OPTIONS = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "speculative": False,
    "compile": False,
    "seed": 0,
}


@pytest.fixture
def writer():
    config = DecoderConfig(
        vocab_size=257, dim=32, num_layers=2, max_tokens=32, attention=GroupedQueryConfig(num_heads=2)
    )
    model = config.build().double()
    initialize(model, 3)
    return Writer(model, Bytes(), config, Namespace(**OPTIONS, max_new_tokens=9))


@pytest.mark.parametrize("batch_size", [2, 3, 100])
def test_batch_changes_no_answer_where_prompts_fill_the_model(writer, batch_size):
    prompts = ["x" * 31, "ab", "", "y" * 25, "abc", "z" * 23]
    alone = [dict(writer.continued([Asked(prompt)], 1))[0] for prompt in prompts]
    assert dict(writer.continued(list(map(Asked, prompts)), batch_size)) == dict(enumerate(alone))


def test_prompt_without_room_is_refused(writer):
    with pytest.raises(ModelError, match="prompt of 32 tokens"):
        writer.show("x" * 32)
    with pytest.raises(ConfigError, match="line 2: given a prompt of 32 tokens"):
        list(writer.continued([Asked("a"), Asked("x" * 32)], 4))


def test_prompt_that_is_no_text_is_refused(writer):
    with pytest.raises(ConfigError, match=r"line 1: .* UTF-8"):
        list(writer.continued([Asked(b"\xff".decode(errors="surrogateescape"))], 1))


def test_no_prompts_have_no_answers(writer):
    assert list(writer.continued([], 4)) == []


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("", []),
        ("a\n\nb", ["a", "", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("\ufeffa\n", ["a"]),
        ("a\u2028b\x0cc\n", ["a\u2028b\x0cc"]),
        ("\n", [""]),
    ],
)
def test_prompts_are_the_lines_of_a_file(tmp_path, text, prompts):
    plain, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_bytes(text.encode())
    objects.write_text("".join(json.dumps({"prompt": p}, ensure_ascii=False) + "\n" for p in prompts))
    assert read_prompts(plain) == read_prompts(objects) == list(map(Asked, prompts))


@pytest.mark.parametrize("line", ['{"prompt": 5}', '["prompt"]', "", "[" * 100_000, '{"prompt": null}'])
def test_line_without_a_prompt_is_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(path)


def test_file_that_is_not_utf_8_is_refused(tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"a\xff\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "prompts.txt")


@pytest.mark.parametrize(
    "flags",
    [
        ["generate", "run", "--batch-size=0"],
        ["generate", "run", "--max-new-tokens=0"],
        ["generate", "run", "--prompt=a", "--prompts=b"],
        ["generate", "run", "--prompt=a", "--interactive"],
        ["eval", "run", "--tasks=a", "--batch-size=-1"],
        ["eval", "run", "--tasks=a", "--limit=0"],
        ["eval", "run", "--tasks=a", "--num-fewshot=-1"],
    ],
)
def test_flags_without_sense_are_refused(flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert "expected at least" in (told := capsys.readouterr().err) or "not allowed with" in told


def test_command_whose_reader_is_gone_leaves_no_traceback(tmp_path):
    (file := tmp_path / "theirs.toml").write_text('[model]\nn_heads = 16\n[data]\ndataset_path = "tokens"\n')
    code = "import sys; sys.stdin.readline(); from forge_trainer.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "convert", "--from=kempnerforge", "--ranks=1", str(file)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        process.stdin.write("go on\n")
        process.stdin.close()
        told = process.stderr.read().splitlines()
        assert told and all(line.startswith("left out: ") for line in told)
        assert process.wait() == 141
