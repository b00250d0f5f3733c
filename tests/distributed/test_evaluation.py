"""What an evaluation tells does not depend on the layout of the ranks."""

import json
import logging
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
from forge_parallel.testing import run_ranks
from forge_trainer.build import build
from forge_trainer.config.job import load_job

pytestmark = pytest.mark.dist

JOB = """
[job]
name = "tiny"
root = "{root}"
[model]
vocab_size = 272
dim = 32
num_layers = 2
max_tokens = 16
attention = {{ num_heads = 4, num_kv_heads = 2 }}
[data]
max_tokens = 16
workers = 0
cache_dir = "{root}/../cache"
validation_samples = 21
tokenizer = {{ type = "bytes" }}
sources = [
    {{ type = "files", name = "a", paths = ["{text}/__init__.py"], validation = ["{text}/config.py"] }},
    {{ type = "files", name = "b", paths = ["{text}/config.py"], validation = ["{text}/handlers.py"] }},
]
[train]
steps = 1
global_batch = 16
micro_batch = 2
[optimizer]
type = "adamw"
lr = 1e-2
[schedule]
type = "constant"
[eval.sets.other]
samples = 11
sources = [{{ type = "files", paths = ["{text}/__init__.py"] }}]
[mesh]
"""
LAYOUTS = {
    "fsdp2": (2, ""),
    "tp2": (2, "tp = 2"),
    "cp2": (2, "cp = 2"),
    "pp2": (2, "pp = 2"),
    "fsdp2-cp2": (4, "cp = 2"),
}
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
{asked}
"""
ASKED = {
    "choice": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}]""",
    "whole": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]""",
    "written": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["zz"], max_gen_toks: 5}
metric_list: [{metric: exact_match}]""",
}


def evaluated(path: str) -> dict[str, float]:
    """The numbers of the evaluation after one step."""
    # `run_ranks` has made the process group already
    with ExitStack() as stack, patch("forge_trainer.build.process_group", lambda *_, **__: nullcontext()):
        run = build(load_job(path).value, stack)
        run.train()
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    found = {}
    for record in map(json.loads, lines):
        found |= record
    return {name: value for name, value in found.items() if name.startswith("eval/")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_tells_the_same_on_every_layout(tmp_path, layout):
    found = []
    for world_size, mesh in ((1, ""), LAYOUTS[layout]):
        root = tmp_path / str(len(found))
        (root / "tiny").mkdir(parents=True)
        path = root / "job.toml"
        path.write_text(JOB.format(root=root, text=Path(logging.__file__).parent) + mesh)
        found.append(run_ranks(evaluated, world_size, str(path), timeout_s=240)[0])
    one, many = found
    names = {f"{m}{s}" for m in ("loss", "perplexity", "bits_per_byte") for s in ("", "/a", "/b")}
    others = {"eval/other/loss", "eval/other/perplexity", "eval/other/bits_per_byte"}
    assert one.keys() == {f"eval/{name}" for name in names} | others
    assert many == pytest.approx(one, rel=1e-5)


@pytest.fixture
def tasks(tmp_path):
    """A folder of tasks over a local file."""
    pytest.importorskip("lm_eval")
    rows = [
        {
            "question": "the quick brown fox "[: 3 + i],
            "choices": ["over the lazy dog", "zzzz", "\x07" * (i + 1)],
            "text": "a longer text than fits into a sequence; " * (i + 1),
            "answer": "over the lazy dog and more",
        }
        for i in range(7)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, asked in ASKED.items():
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data, asked=asked))
    return tmp_path


def run_with_tasks(root, tasks, world_size, mesh, names):
    (root / "tiny").mkdir(parents=True)
    path = root / "job.toml"
    listed = ", ".join(f'"{name}"' for name in names)
    section = f'\n[eval.tasks]\nbatch_size = 3\nnames = [{listed}]\nfolder = "{tasks}"\n'
    path.write_text(JOB.format(root=root, text=Path(logging.__file__).parent) + mesh + section)
    found = run_ranks(evaluated, world_size, str(path), timeout_s=240)[0]
    return {name: value for name, value in found.items() if name.startswith("eval/tasks/")}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2", "tp2", "cp2", "pp2")]
)
def test_tasks_say_the_same_on_every_layout(tmp_path, tasks, layout):
    world_size, mesh = LAYOUTS[layout]
    names = ["choice", "whole"] if mesh else list(ASKED)
    one = run_with_tasks(tmp_path / "one", tasks, 1, "", names)
    assert len(one) == 3 + ("written" in names)
    assert run_with_tasks(tmp_path / "many", tasks, world_size, mesh, names) == pytest.approx(one, rel=1e-5)


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tp", "cp", "pp"])
def test_answers_that_a_layout_cannot_write_are_refused(tmp_path, tasks, axis):
    with pytest.raises(Exception, match=f"written.*mesh.{axis} = 2"):
        run_with_tasks(tmp_path / "x", tasks, 2, f"{axis} = 2", ["written"])
