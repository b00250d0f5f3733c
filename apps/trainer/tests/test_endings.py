"""What begins and ends a text is the same in a run, the harness, `forge generate` and the export."""

import json
import random
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from forge_ckpt.state import TrainState
from forge_ckpt.store import Store
from forge_config import to_toml
from forge_model import initialize
from forge_trainer.cli import main
from forge_trainer.commands.evaluate import load_model
from forge_trainer.commands.generate import Asked, Writer
from forge_trainer.config.job import load_job
from forge_trainer.endings import generation_of
from forge_trainer.run_dir.files import RunFiles, read_job
from kinds import KINDS, MARKED, made_tokenizer

transformers = pytest.importorskip("transformers")
RUN = Path(__file__).parents[3] / "configs" / "runs" / "debug.toml"
TEXTS = ["2+2= 4 and so on", "capital letters", "hello na\u00efve world", "four"]


def a_run(folder: Path, tokenizer: Path, *more: str) -> Path:
    """A run whose model has random weights."""
    keys = [
        f'--job.root="{folder / "runs"}"',
        "--data.tokenizer.type=hf",
        f'--data.tokenizer.path="{tokenizer}"',
        "--model.vocab_size=1024",
        "--model.init_std=0.3",
    ]
    job = load_job(RUN, [*keys, *more]).value
    model, files = job.model.build(), RunFiles(job.job.directory)
    initialize(model, 7)
    Store(files.checkpoints).save(1, TrainState([model], torch.optim.SGD(model.parameters())).capture())
    files.config.write_text(to_toml(job))
    return Path(job.job.directory)


def exported(run: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    out = run.parent / "hf"
    assert main(["export", str(run), str(out)]) == 0, capsys.readouterr().err
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bos", ['"auto"', "true", "false"])
def test_exported_tokenizer_adds_what_the_run_does(tmp_path: Path, capsys, kind: str, bos: str) -> None:
    run = a_run(tmp_path, made_tokenizer(tmp_path / "t", kind), f"--data.tokenizer.bos={bos}")
    out = exported(run, capsys)
    tokenizer = read_job(run).data.tokenizer.build()
    options = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "speculative": False}
    options |= {"compile": False, "seed": 0, "max_new_tokens": 5}
    model, _ = load_model(read_job(run))
    writer = Writer(model, tokenizer, read_job(run).model, Namespace(**options))
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    adds = bos == "true" or (bos == '"auto"' and not kind.startswith("bytelevel"))
    for text in TEXTS:
        ids = writer.prompt(text).tokens
        assert ids == theirs(text)["input_ids"] and (ids[0] == theirs.bos_token_id) == adds
    config = json.loads((out / "config.json").read_text())
    assert config["bos_token_id"] == theirs.bos_token_id


TASKS = {
    "choice": """
task: choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "whole": """
task: whole
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
    "written": """
task: written
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["e"], max_gen_toks: 9}
metric_list: [{metric: exact_match}]
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_harness_says_of_the_run_what_it_says_of_the_export(tmp_path: Path, capsys, kind: str) -> None:
    evaluator = pytest.importorskip("lm_eval.evaluator")
    from forge_trainer.commands.harness import RunModel
    from lm_eval.api.instance import Instance
    from lm_eval.tasks import TaskManager

    draw, words = random.Random(0), " ".join(TEXTS).split()
    texts = [" ".join(draw.choices(words, k=12)) for _ in range(12)]
    rows = [{"question": t[: len(t) // 2], "choices": [t[len(t) // 2 :], "zz"], "text": t} for t in texts]
    run = a_run(tmp_path, made_tokenizer(tmp_path / "t", kind))
    written = RunModel(load_model(read_job(run))[0], read_job(run).data.tokenizer.build(), 2)
    for row in rows:  # what our model writes is the answer that the export has to give
        asked = Instance("generate_until", {}, (row["question"], {"until": ["e"], "max_gen_toks": 9}), 0)
        row["answer"] = written.generate_until([asked])[0]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    files = f"{{data_files: {{test: {tmp_path}/rows.jsonl}}}}"
    shared = f"dataset_path: json\ndataset_kwargs: {files}\ntest_split: test\n"
    for name, text in TASKS.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text + shared)
    flags = ["--tasks", ",".join(TASKS), "--tasks-from", str(tmp_path / "tasks")]
    flags += ["--json", str(tmp_path / "r.json")]
    assert main(["eval", str(run), *flags]) == 0, capsys.readouterr().err
    theirs = evaluator.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(exported(run, capsys)), "dtype": "float32"},
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tmp_path / "tasks")),
        device="cpu",
        batch_size=2,
        log_samples=False,
    )
    ours, numbers = json.loads((tmp_path / "r.json").read_text()), 0
    for task, found in theirs["results"].items():
        for name, value in found.items():
            if isinstance(value, float) and "stderr" not in name:
                assert ours[task][name] == pytest.approx(value, rel=1e-5), (task, name)
                numbers += 1
    assert numbers >= 5 and theirs["results"]["written"]["exact_match,none"] == 1


GENERATION = {"eos_token_id": [2, 4], "pad_token_id": 0, "temperature": 0.6, "do_sample": True}


@pytest.mark.parametrize("beside", ["tokenizer", "weights"])
def test_stop_tokens_and_generation_config_survive(tmp_path: Path, capsys, beside: str) -> None:
    folder = made_tokenizer(tmp_path / "t", "bytelevel")
    first = exported(a_run(tmp_path / "first", folder), capsys)
    weights = [f'--train.init_from="{first}"'] if beside == "weights" else []
    at = first if beside == "weights" else folder
    (at / "generation_config.json").write_text(json.dumps(GENERATION))
    run = a_run(tmp_path, folder, *weights)
    out = exported(run, capsys)
    assert json.loads((out / "generation_config.json").read_text()) == GENERATION | {"bos_token_id": 1}
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == [2, 4]
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == [2, 4]
    job = read_job(run)
    assert generation_of(job, job.data.tokenizer.build())["eos_token_id"] == [2, 4]


def test_generate_ends_at_each_stop_token(tmp_path: Path) -> None:
    folder = made_tokenizer(tmp_path / "t", "bytelevel")
    run = a_run(tmp_path, folder)
    model, _ = load_model(read_job(run))
    options = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "speculative": False}
    options |= {"compile": False, "seed": 0, "max_new_tokens": 30}
    tokenizer = read_job(run).data.tokenizer.build()
    free = Writer(model, tokenizer, read_job(run).model, Namespace(**options))
    with torch.no_grad():
        tokens = torch.tensor([free.prompt("hello").tokens])
        second = int(
            model(torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1))[0, -1].argmax()
        )
    (written,) = dict(
        Writer(model, tokenizer, read_job(run).model, Namespace(**options), [2, second]).continued(
            [Asked("hello")], 1
        )
    ).values()
    assert (
        len(tokenizer.encode(written))
        <= 1
        < len(tokenizer.encode(dict(free.continued([Asked("hello")], 1))[0]))
    )


def test_export_has_the_template_that_the_conversations_were_trained_with(tmp_path: Path, capsys) -> None:
    folder = made_tokenizer(tmp_path / "t", "metaspace")
    chat = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    for number, (template, is_same) in enumerate(
        {
            "tokenizer": True,
            "<|im_start|>{role}\n{content}<|im_end|>\n": True,
            "[{role}] {content} </s>": False,
        }.items()
    ):
        source = {
            "type": "hf",
            "path": str(tmp_path / "rows.jsonl"),
            "messages": "messages",
            "template": template,
        }
        listed = ", ".join(f"{key}={json.dumps(value)}" for key, value in source.items())
        run = a_run(tmp_path / str(number), folder, f"--data.sources=[{{{listed}}}]")
        out = exported(run, capsys)
        theirs = transformers.AutoTokenizer.from_pretrained(out)
        assert (theirs.chat_template == MARKED) == is_same
        text = theirs.apply_chat_template(chat, tokenize=False)
        if not is_same:
            assert text == "<s>[user] 2+2= </s>[assistant] 4 </s>"
            asked = theirs.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
            assert asked == "<s>[user] 2+2= </s>[assistant] "


def test_error_with_a_name_that_is_no_text_is_told_to_the_others():
    import torch.distributed as dist
    from forge_resilience.exit_codes import ExitCode
    from forge_trainer.end_together import FAILED, EndTogether

    together = EndTogether(None, type("Place", (), {"rank": 1, "world_size": 2}))
    together._store = dist.HashStore()
    with pytest.raises(FileNotFoundError), together.telling(lambda error: ExitCode.FAILED):
        raise FileNotFoundError("\udcff.txt")
    assert b"FileNotFoundError: ?.txt" in together._store.get(FAILED)
