"""What a run writes is what transformers writes with its export."""

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROMPTS = ["import ", "def f(self", "x", "class Encoder:", 'a "quoted" b']


def test_prompts_of_a_file_are_continued_like_transformers_does(forge, tiny, tmp_path):
    transformers = pytest.importorskip("transformers")
    import torch

    forge("train", tiny(steps=12))
    run, folder = tmp_path / "runs" / "tiny", tmp_path / "hf"
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    flags = ("--temperature", 0, "--max-new-tokens", 11, "--batch-size", 2)
    files = [tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"]
    plain, objects = (forge("generate", run, "--prompts", file, *flags).stdout for file in files)
    assert plain == objects
    found = [json.loads(line) for line in plain.splitlines()]
    assert [one["prompt"] for one in found] == PROMPTS
    assert forge("generate", run, "--prompts", files[0], *flags, "--compile").stdout == plain

    forge("export", run, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt, one in zip(PROMPTS, found, strict=True):
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        written = model.generate(tokens, max_new_tokens=11, do_sample=False)[0, tokens.shape[1] :]
        assert one["text"] == tokenizer.decode(written, skip_special_tokens=True)
        typed = forge("generate", run, "--prompt", prompt, "--temperature", 0, "--max-new-tokens", 11)
        assert typed.stdout == prompt + one["text"] + "\n"


def test_prompts_that_cannot_be_read_are_an_error_that_names_them(forge, tiny, tmp_path):
    forge("train", tiny(steps=3))
    run, file = tmp_path / "runs" / "tiny", tmp_path / "prompts.jsonl"
    refused = forge("generate", run, "--prompts", file, check=False)
    assert refused.returncode == 78 and "cannot be read" in refused.stderr
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    refused = forge("generate", run, "--prompts", file, check=False)
    assert refused.returncode == 78 and "line 2" in refused.stderr
