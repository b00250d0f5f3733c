"""benchmarks/gpu/ runs as it stands, with a tiny model on a CPU: who gets a GPU finds no broken script."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture(scope="module")
def mfu():
    folders = [str(FOLDER), str(FOLDER.parent)]
    sys.path[:0] = folders
    try:
        import mfu
    finally:
        for folder in folders:
            sys.path.remove(folder)
    return mfu


CHANGES = [
    {},
    {"recompute": "full"},
    {"recompute": "every-2"},
    {"recompute": "selective"},
    {"recompute": "offload"},
    {"fp8": "tensorwise"},
    {"state": "moments-bf16"},
    {"state": "bf16"},
    {"documents": 16},
    {"routing": "forced"},
    {"routing": "learned", "fp8": "rowwise"},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_kind_of_case_trains(mfu, change, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = "tiny-moe" if "routing" in change else "tiny"
    base = mfu.Case(model=model, tokens=64, micro_batch=2, compile=False)
    case = mfu.Case(**{name: getattr(base, name) for name in mfu.Case.__struct_fields__} | change)
    found = mfu.measure(case, 1, 1)
    assert found["tokens_per_s"] == pytest.approx(128 / found["step_s"])
    assert mfu.shown(mfu.refused(case, None) | found)["tokens/s"] == f"{found['tokens_per_s']:,.0f}"


def test_sweeps_name_each_setting_once_and_offload_is_never_compiled(mfu):
    found = mfu.cases(["1b", "3b", "8b"], list(mfu.SWEEPS))
    assert len(found) == len({str(case) for case in found}) > 30
    assert not [case for case in found if case.compile and case.recompute == "offload"]
    for case in found:
        assert case.parallel("cuda").compile.enabled == case.compile
        assert case.parallel("cuda").precision.needs_group("cuda") == (case.state != "bf16")


@pytest.mark.parametrize("recompute", ["full", "every-2"])
def test_repeated_flops_are_those_that_are_counted(mfu, recompute):
    from forge_model import LossConfig, initialize
    from forge_parallel.activation_checkpointing import checkpoint_activations

    case = mfu.Case(model="tiny", tokens=64, recompute=recompute)
    counts = []
    for mode in (None, case.parallel("cpu").activation_checkpointing):
        model = case.config.build()
        initialize(model, 0)
        if mode is not None:
            checkpoint_activations(model.layers.values(), mode)
        tokens = torch.zeros(1, 64, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            model(tokens, labels=tokens, loss_fn=LossConfig().build()).total.backward()
        counts.append(counter.get_total_flops())
    repeated = (counts[1] - counts[0]) / 64
    # what nothing needs again is not repeated: the product of the last matrix of each block
    assert repeated == pytest.approx(case.recomputed(causal=False), rel=0.2)
    assert repeated <= case.recomputed(causal=False)


def test_table_goes_into_the_docs_between_its_marks(mfu, tmp_path):
    page = tmp_path / "speed.md"
    page.write_text(mfu.PAGE.read_text())
    mfu.put_into_docs("| a |", page)
    text = page.read_text()
    assert text.count(mfu.BEGIN) == text.count(mfu.END) == 1 and f"{mfu.BEGIN}\n| a |\n{mfu.END}" in text
    mfu.put_into_docs("| b |", page)
    assert page.read_text() == text.replace("| a |", "| b |")


def test_script_that_carries_a_command_to_the_device_finds_all_packages(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_WHEELS", str(tmp_path))
    script = str(FOLDER / "run_on_device.sh")
    code = "import forge_trainer, os; print(forge_trainer.__file__, os.getcwd())"
    done = subprocess.run([script, sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    root = FOLDER.parents[1]
    assert done.stdout.split() == [
        str(root / "apps/trainer/src/forge_trainer/__init__.py"),
        str(root),
    ], done.stderr


def test_readme_names_only_files_and_options_that_exist():
    text = (FOLDER / "README.md").read_text()
    for path in re.findall(r"(?:benchmarks|tests|docs)/[\w/]+\.\w+", text):
        assert (FOLDER.parents[1] / path).exists(), path
    options = set(re.findall(r"(?:mfu|moe)\.py.*?(--[a-z-]+)", text))
    assert options and all(option in (FOLDER / "mfu.py").read_text() for option in options)


@pytest.mark.slow
def test_script_runs_from_the_command_line(tmp_path):
    command = [sys.executable, str(FOLDER / "mfu.py"), "--tiny", "--sweeps", "base", "documents"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "mfu_tiny.json").read_text())
    assert [case["documents"] for case in record["results"]["cases"]] == [0, 512]
    assert (tmp_path / "mfu_tiny.md").read_text().count("| tiny ") == 2
