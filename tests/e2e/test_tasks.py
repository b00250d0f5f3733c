"""A run under lm-evaluation-harness says what its export says."""

import json

import pytest
from runs import records, state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TP = "--mesh.tp=2", "--model.attention.num_kv_heads=2"
SHARED = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
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


@pytest.fixture
def tasks(tmp_path):
    """A folder of tasks over a local file, with an answer that the model gives and one that it does not."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [
        {
            "question": "the quick brown fox " * (1 + i % 3) + "jumps ",
            "choices": ["over the lazy dog", "zzzz qqqq", "\x07" * (i + 1)],
            "text": "a longer text than a model of so few positions can see at once; " * (i + 1),
            "answer": "ov",
        }
        for i in range(7)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text + SHARED.format(data=data))
    return folder


def numbers(results: dict) -> dict[str, float]:
    return {
        f"{task}/{name}": value
        for task, found in results.items()
        for name, value in found.items()
        if isinstance(value, float) and "stderr" not in name
    }


def test_run_and_its_export_get_the_same_results(forge, tiny, tmp_path, tasks):
    evaluator = pytest.importorskip("lm_eval.evaluator")
    from lm_eval.tasks import TaskManager

    forge("train", tiny(steps=12))
    run, out = tmp_path / "runs" / "tiny", tmp_path / "results.json"
    flags = ("--tasks-from", tasks, "--json", out, "--batch-size", 3)
    shown = forge("eval", run, "--tasks", ",".join(TASKS), *flags).stdout
    assert "at step 12" in shown and "bits_per_byte" in shown
    forge("export", run, tmp_path / "hf")
    theirs = evaluator.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(tmp_path / "hf"), "dtype": "float32"},
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks)),
        device="cpu",
        batch_size=2,
        log_samples=False,
    )
    ours, expected = numbers(json.loads(out.read_text())), numbers(theirs["results"])
    assert len(ours) >= 5 and ours.keys() == expected.keys()
    assert ours == pytest.approx(expected, rel=1e-5)


IN_THE_LOOP = """
[eval.tasks]
names = ["choice", "whole", "written"]
folder = "{folder}"
every_steps = 6
"""

HEARS = """
[hooks.hears]
type = "class"
path = "my_lab_hears:Hears"
"""

EAR = """
import json
from forge_trainer.hooks import Hook


class Hears(Hook):
    def __init__(self, run):
        self.run = run

    def on_eval(self, progress, results):
        with open(self.run.directory / "heard.jsonl", "a") as file:
            file.write(json.dumps({"step": progress.step} | dict(results)) + "\\n")
"""


def test_tasks_while_training_say_what_the_trained_run_gets_and_change_nothing(forge, tiny, tmp_path, tasks):
    (tmp_path / "my_lab_hears.py").write_text(EAR)
    job = tiny(steps=12, extra=IN_THE_LOOP.format(folder=tasks) + HEARS)
    forge("train", job, "--train.steps=7")
    said = forge("train", job, "--change").stdout
    assert "whole/bits_per_byte" in said
    run, out = tmp_path / "runs" / "tiny", tmp_path / "results.json"
    logged = [r for r in records(run) if any(name.startswith("eval/tasks/") for name in r)]
    assert [record["step"] for record in logged] == [6, 7, 12]
    forge("eval", run, "--tasks", ",".join(TASKS), "--tasks-from", tasks, "--json", out)
    heard = [json.loads(line) for line in (run / "heard.jsonl").read_text().splitlines()]
    of_tasks = [one for one in heard if "eval/loss" not in one]
    assert [one["step"] for one in of_tasks] == [6, 7, 12]
    assert all(one.items() <= record.items() for one, record in zip(of_tasks, logged, strict=True))
    assert len(heard) > len(of_tasks) and all(len(one) > 5 for one in of_tasks)
    expected = {
        f"eval/tasks/{name.removesuffix(',none')}": value
        for name, value in numbers(json.loads(out.read_text())).items()
    }
    found = {name: value for name, value in logged[-1].items() if name.startswith("eval/tasks/")}
    assert len(found) >= 5 and found == pytest.approx(expected, rel=1e-5)
    without = tmp_path / "without"
    forge("train", tiny(steps=12, root=without), "--train.steps=7")
    forge("train", tiny(steps=12, root=without), "--change")
    assert state(without / "tiny") == state(run)


def test_tasks_that_cannot_be_used_are_refused_before_the_first_step(forge, tiny, tmp_path, tasks):
    gone = TASKS["choice"].replace("choice\n", "gone\n", 1) + SHARED.format(data=tmp_path / "no")
    (tasks / "gone.yaml").write_text(gone)
    for name, said in {"no_such_task": "no_such_task", "gone": "cannot be loaded"}.items():
        extra = IN_THE_LOOP.format(folder=tasks).replace('"choice", "whole", "written"', f'"{name}"')
        refused = forge("train", tiny(steps=3, extra=extra), check=False)
        assert refused.returncode == 78 and said in refused.stderr, refused.stderr
        assert not (tmp_path / "runs" / "tiny" / "config.toml").exists()


def test_unknown_task_is_named(forge, tiny, tmp_path):
    forge("train", tiny(steps=3))
    refused = forge("eval", tmp_path / "runs" / "tiny", "--tasks", "no_such_task", check=False)
    assert refused.returncode == 78 and "no_such_task" in refused.stderr


def test_task_whose_data_are_out_of_reach_is_named_at_once(forge, tiny, tmp_path, monkeypatch):
    forge("train", tiny(steps=3))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    done = forge("eval", tmp_path / "runs" / "tiny", "--tasks", "hellaswag", check=False)
    assert done.returncode == 78 and "Traceback" not in done.stderr
    said, _, error = done.stderr.partition("the data of hellaswag cannot be read")
    assert "reading the data of hellaswag" in said and "HF_HOME" in error


@pytest.mark.parametrize(("mesh", "names"), [((), "choice,whole,written"), (TP, "choice,whole")])
def test_ranks_that_share_a_model_say_of_tasks_what_one_process_does(
    forge, tiny, tmp_path, tasks, mesh, names
):
    run, one, many = tmp_path / "runs" / "tiny", tmp_path / "one.json", tmp_path / "many.json"
    forge("train", tiny(steps=6), *mesh, ranks=2)
    asked = ("eval", run, "--tasks", names, "--tasks-from", tasks, "--step", "all")
    forge(*asked, "--json", one)
    forge(*asked, "--json", many, ranks=2)
    expected, found = (json.loads(path.read_text()) for path in (one, many))
    assert [row["step"] for row in found] == [3, 6]
    for ours, theirs in zip(found, expected, strict=True):
        assert len(numbers(flat(ours))) > 3
        assert numbers(flat(ours)) == pytest.approx(numbers(flat(theirs)), rel=1e-5)
    if mesh:
        refused = forge("eval", run, "--tasks", "written", "--tasks-from", tasks, ranks=2, check=False)
        assert refused.returncode == 78 and "--tasks names written, which write answers" in refused.stderr


def flat(row):
    return {name: found for name, found in row.items() if isinstance(found, dict)}
