"""`forge eval` and `forge generate` on a folder of a Hugging Face model, against `transformers`."""

import json
import shutil

import pytest
import torch
from forge_trainer.cli import main
from instruct import CORPUS, KINDS, TASKS, instruct_model, write_tasks

transformers = pytest.importorskip("transformers")

PROMPTS = [
    "the quick",
    "What is the capital of",
    "x",
    " two  spaces",
    "def encode(self, text):",
    "naïve 東京",
]


@pytest.fixture(params=KINDS)
def published(request, tmp_path):
    folder = tmp_path / "model"
    return folder, *instruct_model(request.param, folder)


def written(model, tokenizer, prompt, count):
    """What `transformers` writes greedily, with the settings of the folder."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    new = model.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)


def test_folder_writes_what_transformers_does(published, tmp_path, capsys):
    folder, model, tokenizer = published
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    flags = ["--temperature", "0", "--max-new-tokens", "17", "--batch-size", "4"]
    assert main(["generate", str(folder), "--prompts", str(tmp_path / "prompts.txt"), *flags]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["prompt"] for one in found] == PROMPTS
    expected = [written(model, tokenizer, prompt, 17) for prompt in PROMPTS]
    assert [one["text"] for one in found] == expected
    assert len({*expected}) > 3


@torch.no_grad()
def test_loss_of_a_folder_on_text_is_that_of_transformers(published, tmp_path, capsys):
    folder, model, tokenizer = published
    documents = [CORPUS[1], CORPUS[2], CORPUS[0]]
    rows = tmp_path / "text.jsonl"
    rows.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    options = ["--text", str(rows), "--json", str(tmp_path / "found.json"), "--max-tokens", "96"]
    assert main(["eval", str(folder), *options]) == 0
    assert str(folder) in capsys.readouterr().out
    total, count = 0.0, 0
    for document in documents:
        ids = torch.tensor([[*tokenizer(document).input_ids, tokenizer.eos_token_id]])
        assert ids.shape[1] < 96
        logits = model(ids).logits[0, :-1].double()
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["eval/text/loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.slow
def test_tasks_on_a_folder_say_what_the_harness_does(published, tmp_path):
    evaluator = pytest.importorskip("lm_eval.evaluator")
    from lm_eval.tasks import TaskManager

    folder, model, tokenizer = published
    answers = [written(model, tokenizer, CORPUS[i % 5][: 20 + i], 9) if i % 2 else "no" for i in range(5)]
    tasks, out = write_tasks(tmp_path / "tasks", answers), tmp_path / "found.json"
    flags = ["--tasks-from", str(tasks), "--json", str(out), "--batch-size", "3"]
    assert main(["eval", str(folder), "--tasks", ",".join(TASKS), *flags]) == 0
    theirs = evaluator.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks)),
        device="cpu",
        batch_size=2,
        log_samples=False,
    )
    ours, expected = numbers(json.loads(out.read_text())), numbers(theirs["results"])
    assert len(ours) >= 5 and ours == pytest.approx(expected, rel=1e-5)


def numbers(results):
    return {
        f"{task}/{name}": value
        for task, found in results.items()
        for name, value in found.items()
        if isinstance(value, float) and "stderr" not in name
    }


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "AutoTokenizer"),
        (lambda folder: (folder / "model.safetensors").unlink(), "expected a folder of safetensors"),
        (lambda folder: change(folder, model_type="bert"), "given model_type 'bert'"),
        (lambda folder: change(folder, hidden_size=64), "its config.json means"),
        (lambda folder: change(folder, num_hidden_layers=3, layer_types=None), "missing"),
        (lambda folder: change(folder, vocab_size=20), "ids"),
        (lambda folder: shutil.rmtree(folder), "is no run"),
    ],
)
def test_folder_that_is_no_whole_model_is_refused_with_a_reason(tmp_path, capsys, harm, said):
    instruct_model("bytelevel", tmp_path / "model")
    harm(tmp_path / "model")
    assert main(["generate", str(tmp_path / "model"), "--prompt", "a"]) == 78
    assert said in capsys.readouterr().err


def test_folder_without_text_or_tasks_is_told_what_to_name(tmp_path, capsys):
    instruct_model("bytelevel", tmp_path / "model")
    assert main(["eval", str(tmp_path / "model")]) == 78
    assert "name files by --text, or --tasks" in capsys.readouterr().err


def test_name_of_the_hub_is_looked_for_in_its_cache(tmp_path, capsys, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path / "model"))
    instruct_model("metaspace", tmp_path / "model")
    flags = ["--prompt", "the quick", "--temperature", "0", "--max-new-tokens", "5"]
    assert main(["generate", str(tmp_path / "model"), *flags]) == 0
    expected = capsys.readouterr().out
    assert main(["generate", "hf://my-lab/model", *flags]) == 0
    assert capsys.readouterr().out == expected


def change(folder, **keys):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
