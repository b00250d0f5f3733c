"""benchmarks/gpu/ runs as it stands, with a tiny model on a CPU: who gets a GPU finds no broken script."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from msgspec import structs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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


def test_one_table_of_several_results_names_card_and_command_of_each(mfu):
    folder = FOLDER.parent / "results" / "gpu"
    text = mfu.of_files([folder / "mfu_1b_h100.json", folder / "moe_h200.json"])
    rows = [line for line in text.splitlines() if line.startswith("| H")]
    assert len(rows) == 3 and "58,932" in rows[0] and " H200 " in rows[1] and " forced " in rows[1]
    assert "moe.py --models moe-4b" in text.splitlines()[-1]


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


@pytest.mark.parametrize("threads", [None, "3"])
def test_script_that_carries_a_command_sets_what_the_device_lacks(threads, tmp_path, monkeypatch):
    """An interface for both backends, cores for the compiler (elsewhere tests take one), growing memory."""
    monkeypatch.setenv("FORGE_WHEELS", str(tmp_path))
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHINDUCTOR_COMPILE_THREADS")
    for name in (*names, "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS"):  # which nproc heeds
        monkeypatch.delenv(name, raising=False)
    if threads is not None:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", threads)
    script = [str(FOLDER / "run_on_device.sh"), sys.executable, "-c"]
    # as in tests there, which the conftest of this repository is part of
    places = [str(FOLDER.parents[1]), str(FOLDER.parents[1] / "tests" / "shared")]
    code = f"import sys; sys.path[:0] = {places}; import conftest, json, os; "
    code += "print(json.dumps(dict(os.environ)))"
    told = json.loads(subprocess.check_output([*script, code], text=True))
    cores = len(os.sched_getaffinity(0))
    assert [told[name] for name in names] == ["lo", "lo", threads or str(cores)]
    assert told["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_weights_are_drawn_on_the_device_and_not_on_the_host(mfu):
    """8B on one thread of the host takes 46 s of ten minutes. Tensors of a GPU are played."""

    class Made(TorchDispatchMode):
        devices: ClassVar[set] = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.devices |= {x.device.type for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
            return out

    with FakeTensorMode():
        with torch.device("cuda"):
            model = mfu.Case(model="tiny").config.build()
        with Made() as made:
            mfu.draw(model)
    assert made.devices == {"cuda"}


def test_readme_names_only_files_and_options_that_exist():
    text = (FOLDER / "README.md").read_text()
    for path in re.findall(r"(?:benchmarks|tests|docs)/[\w/]+\.\w+", text):
        assert (FOLDER.parents[1] / path).exists(), path
    options = set(re.findall(r"(?:mfu|moe)\.py.*?(--[a-z-]+)", text))
    assert options and all(option in (FOLDER / "mfu.py").read_text() for option in options)


H100_GIB, H200_GIB = 81559 / 1024, 143771 / 1024
"""As nvidia-smi tells them."""


@pytest.fixture
def started(mfu, monkeypatch):
    """The cases that `run` starts on a GPU of so much memory; none is."""
    found = []

    def run(command, **_):
        found.append(json.loads(command[command.index("--case") + 1]))
        return subprocess.CompletedProcess(command, 0, stdout='{"tokens_per_s": 1.0}', stderr="")

    def on(gib, cases):
        monkeypatch.setenv("FORGE_GPU_GIB", str(gib))
        mfu.memory_gib.cache_clear()
        found.clear()
        rows = [mfu.run(case, 1, 1, 60.0) for case in cases]
        return rows, list(found)

    monkeypatch.setattr(mfu.subprocess, "run", run)
    yield on
    mfu.memory_gib.cache_clear()


@pytest.mark.parametrize(
    ("gib", "model", "sweep", "refused"),
    [
        # 12 bytes a parameter of 8.03 billion are 89.8 GiB
        (H100_GIB, "8b", "base", True),
        (H200_GIB, "8b", "base", False),
        (H100_GIB, "8b", "fp8", True),
        (H200_GIB, "8b", "fp8", False),
        (H100_GIB, "1b", "base", False),
        (H100_GIB, "1b", "fp8", False),
        (H100_GIB, "1b", "state", False),
        (H100_GIB, "1b", "documents", False),
        (H100_GIB, "3b", "base", False),
        (H100_GIB, "3b", "compile", True),
        (H200_GIB, "3b", "compile", False),
        (H100_GIB, "moe-4b", "routing", False),
        (H200_GIB, "moe-4b", "fp8", False),
    ],
)
def test_case_that_cannot_fit_is_refused_before_it_is_started(mfu, started, gib, model, sweep, refused):
    chosen = mfu.cases([model], [sweep])
    rows, begun = started(gib, chosen)
    assert len(begun) == (0 if refused else len(chosen))
    for row in rows:
        assert row.get("error", "").startswith("out of memory: needs ") == refused
        assert refused or row["tokens_per_s"] == 1.0


def test_a_call_that_measures_nothing_leaves_no_results(mfu, monkeypatch, tmp_path):
    """Results that are kept in the repository stay; who names a folder finds what was refused."""
    monkeypatch.setattr(mfu, "memory_gib", lambda: 1.0)

    def results():
        return sorted((path, path.stat().st_mtime_ns) for path in (FOLDER.parent / "results").rglob("*"))

    kept = results()
    monkeypatch.setattr(sys, "argv", ["mfu.py", "--models", "8b"])
    mfu.main()
    assert results() == kept
    monkeypatch.setattr(sys, "argv", ["mfu.py", "--models", "8b", "--out", str(tmp_path)])
    mfu.main()
    assert "not started" in (tmp_path / "mfu.json").read_text()


def test_refusal_follows_the_memory_of_the_gpu_case_by_case(mfu, started):
    """What needs most is refused first as a GPU gets smaller; where nothing is known all are started."""
    chosen = mfu.cases(["8b"], ["micro_batch", "reference"])
    needs = [case.needed_gib for case in chosen]
    for gib in (H100_GIB, H200_GIB):
        _, begun = started(gib, chosen)
        assert len(begun) == sum(need <= gib - mfu.RESERVED_GIB for need in needs)
    assert 0 < len(started(H100_GIB, chosen)[1]) < len(started(H200_GIB, chosen)[1]) < len(chosen)
    unknown = [mfu.Case(model="tiny", tokens=64, micro_batch=3)]
    assert len(started(1, unknown)[1]) == 1


def test_peaks_are_kept_of_every_case_and_hold_at_least_the_state_of_its_parameters(mfu):
    per_parameter = {"float32": 16, "moments-bf16": 12, "bf16": 8}
    for case in mfu.cases(["1b", "3b", "8b", "moe-4b"], list(mfu.SWEEPS)):
        with torch.device("meta"):
            model = case.config.build()
        state = sum(p.numel() for p in model.parameters()) * per_parameter[case.state] / mfu.GIB
        assert case.needed_gib is not None, f"{case}: run benchmarks/traced.py --peaks"
        assert state < case.needed_gib < 1.1 * state + 14 * case.micro_batch, case


def test_peaks_grow_with_what_blocks_keep(mfu):
    """Uncompiled ones keep more than compiled ones; those that are recomputed, some or all, keep less."""
    for model in ("1b", "3b", "8b"):
        (base,) = mfu.cases([model], ["base"])
        ways = ({"compile": False}, {}, {"recompute": "every-2"}, {"recompute": "full"})
        needs = [structs.replace(base, **way).needed_gib for way in ways]
        assert needs == sorted(needs, reverse=True) and needs[0] > 1.2 * needs[1], (model, needs)


PLAYED = """
import json, pathlib, sys, time
words = sys.argv[1:]
if words[0] == "-c":
    name, out = "versions", words[-1]
else:
    options = dict(zip(words, words[1:]))
    script, out = pathlib.Path(words[0]).stem, options["--out"]
    unlike = {"mfu": "mfu_tiny", "moe": "moe_gpu_tiny", "loss": "loss_gpu_tiny", "commands": "commands"}
    name = options.get("--name", unlike.get(script, script + "_tiny"))
if name == "groups":
    raise SystemExit(3)
if name == "waits":
    time.sleep(60)
if name != "training":
    pathlib.Path(out).mkdir(exist_ok=True)
    (pathlib.Path(out) / f"{name}.json").write_text("{}")
"""
PARTS = [
    *("versions", "groups", "training", "waits", "attention", "numbers", "experts", "eight-bits-and-offload"),
    *("1b-base", "1b-fp8", "1b-state", "1b-documents", "moe-routing", "resume", "profiled", "8b-reference"),
    *("loss", "commands"),
]


@pytest.fixture
def first_day(tmp_path, monkeypatch):
    """The script, whose parts only leave a file: of `groups` none and an error, `waits` takes too long."""
    for name, text in {
        "python": f"#!{sys.executable}\n{PLAYED}",
        "timeout": '#!/bin/bash\nshift 3\nexec /usr/bin/timeout -k 1 3 "$@"\n',
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHON", str(tmp_path / "python"))

    def run(*words):
        out = tmp_path / "out"
        command = [str(FOLDER / "first_day.sh"), "--dry", str(out), *words]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = (
            (out / "first_day.jsonl").read_text().splitlines() if (out / "first_day.jsonl").exists() else []
        )
        return done, {part["name"]: part["code"] for part in map(json.loads, lines)}

    return run


def test_parts_of_the_first_day_that_fail_are_told_and_stop_nothing(first_day, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "training.json").write_text("{}")  # of another day
    done, codes = first_day()
    assert list(codes) == PARTS
    wrong = {name: code for name, code in codes.items() if code}
    assert wrong == {"groups": 3, "training": 97, "waits": 124}
    assert done.returncode == 1 and "3 parts failed" in done.stdout


def test_call_of_the_first_day_ends_in_time_and_says_where_the_next_goes_on(first_day, monkeypatch):
    monkeypatch.setenv("FIRST_DAY_S", "22")
    done, codes = first_day("4")
    assert codes == {"waits": 124} and "go on with part 4: first_day.sh OUT 4" in done.stdout
    monkeypatch.setenv("FIRST_DAY_S", "600")
    done, codes = first_day("5", "7")
    assert list(codes) == ["waits", "attention", "numbers", "experts"] and done.returncode == 0


@pytest.mark.slow
def test_script_runs_from_the_command_line(tmp_path):
    command = [sys.executable, str(FOLDER / "mfu.py"), "--tiny", "--sweeps", "base", "documents"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "mfu_tiny.json").read_text())
    assert [case["documents"] for case in record["results"]["cases"]] == [0, 512]
    assert (tmp_path / "mfu_tiny.md").read_text().count("| tiny ") == 2
