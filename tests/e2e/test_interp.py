"""forge-interp on runs of ours: an exported checkpoint, and recording while a run trains."""

import json
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from forge_interp import capture
from forge_interp.extraction.store import ActivationStore
from forge_trainer.commands.evaluate import load_model
from forge_trainer.run_dir.files import read_job

OURS = ["layers.*:out", "layers.*.attention:attn.pattern"]
THEIRS = ["model.layers.*:out", "model.layers.*.self_attn:attn.pattern"]

ALONE = """
import sys
import numpy as np
from forge_interp import capture
from forge_interp.extraction.store import ActivationStore
from transformers import AutoModelForCausalLM
import torch

folder, tokens, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder).eval()
with torch.no_grad(), capture(model, {sites}) as acts:
    model(torch.from_numpy(np.load(tokens)), use_cache=False)
np.savez(out, **{{key: value.numpy() for key, value in acts.items()}})
used = sorted(name for name in sys.modules if name.startswith("forge_") and "." not in name)
assert used == ["forge_interp"], used
"""


def seen(model: torch.nn.Module, sites: list[str], tokens: torch.Tensor) -> list[np.ndarray]:
    """What flows through the sites, in the order of the model, whatever they are called there."""
    with torch.no_grad(), capture(model, sites) as acts:
        model(tokens)
    return [acts[key].numpy() for key in sorted(acts)]


@pytest.mark.slow
def test_exported_run_is_the_same_inside_by_every_way_of_reading_it(forge, tiny, tmp_path):
    transformers = pytest.importorskip("transformers")
    forge("train", tiny(steps=6))
    run, folder = tmp_path / "runs" / "tiny", tmp_path / "hf"
    forge("export", run, folder)
    tokens = torch.randint(272, (3, 32), generator=torch.Generator().manual_seed(0))
    own, _ = load_model(read_job(run))
    expected = seen(own, OURS, tokens)
    assert len(expected) == 4 and expected[0].std() > 0.01

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)

    np.save(tmp_path / "tokens.npy", tokens.numpy())
    arguments = [str(folder), str(tmp_path / "tokens.npy"), str(tmp_path / "alone.npz")]
    script = ALONE.format(sites=THEIRS)
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    alone = np.load(tmp_path / "alone.npz")

    for found in (
        seen(theirs, THEIRS, tokens),
        [alone[key] for key in sorted(alone.files)],
    ):
        for value, reference in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, reference, rtol=1e-5, atol=1e-5)


RECORD = """
[hooks.inside]
type = "record"
every_steps = 2
samples = 3
sites = ["layers.*:out", "layers.*.attention:attn.entropy"]
summaries = true
"""


def recordings(run: Path) -> dict[str, bytes]:
    folder = run / "activations"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


def steps_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "activations").iterdir())


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_run_ends_with_the_recordings_of_an_uninterrupted_one(forge, tiny, tmp_path, ranks):
    forge("train", tiny(steps=12, name="whole.toml", root=tmp_path / "whole", extra=RECORD), ranks=ranks)
    cut = tiny(steps=12, extra=RECORD)
    run = tmp_path / "runs" / "tiny"
    assert forge.stop_at(cut, 5, signal.SIGKILL, ranks) != 0
    for path in (run / "activations").glob("step-*/index.json"):
        assert ActivationStore.open(path.parent).rows == 3 * 32
    forge("train", cut, ranks=ranks)
    expected = recordings(tmp_path / "whole" / "tiny")
    assert steps_of(tmp_path / "whole" / "tiny") == [f"step-{step:08d}" for step in range(0, 13, 2)]
    assert recordings(run) == expected
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "interp/layers.0:out/rms" in line] == [2, 4, 6, 8, 10, 12]


@pytest.mark.slow
def test_every_recording_is_whole_whenever_the_run_is_killed(forge, tiny, tmp_path):
    often = RECORD.replace("every_steps = 2", "every_steps = 1")
    forge("train", tiny(steps=12, name="whole.toml", root=tmp_path / "whole", extra=often))
    expected = recordings(tmp_path / "whole" / "tiny")
    cut = tiny(steps=12, extra=often)
    folder = tmp_path / "runs" / "tiny" / "activations"
    for step, wait_s in ((4, 0.002), (8, 0.006)):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(forge.command("train", cut), env=forge.environment, **quiet)
        while not (folder / f"step-{step:08d}").exists() and process.poll() is None:
            time.sleep(0.0005)
        time.sleep(wait_s)
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        for index in folder.glob("step-*/index.json"):
            for path in index.parent.iterdir():
                assert path.read_bytes() == expected[str(path.relative_to(folder))]
    forge("train", cut)
    assert recordings(tmp_path / "runs" / "tiny") == expected


@pytest.mark.slow
def test_run_whose_disk_is_full_says_so_and_goes_on_when_there_is_room(forge, tiny, tmp_path):
    path = tiny(steps=3, extra=RECORD.replace("samples = 3", "samples = 300"))
    folder = tmp_path / "runs" / "tiny" / "activations"
    quiet = {"capture_output": True, "text": True, "env": forge.environment}
    forge("train", tiny(steps=3, name="before.toml", root=tmp_path / "before"))  # makes the store of tokens
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (15_000, 15_000))  # a part has 21 kB
    done = subprocess.run(forge.command("train", path), preexec_fn=limit, **quiet)
    assert done.returncode == 78, done.stderr
    assert "trial cannot be written" in done.stderr and "expected room on that disk" in done.stderr
    assert "Traceback" not in done.stderr and list(folder.iterdir()) == []
    forge("train", path)
    assert steps_of(folder.parent) == [f"step-{step:08d}" for step in (0, 2, 3)]


def test_documented_hook_and_analysis_run(forge, tiny, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    hook = "[hooks.inside]" + page.partition("```toml\n[hooks.inside]")[2].partition("```")[0]
    hook = hook.replace("every_steps = 100", "every_steps = 5")
    forge("train", tiny(steps=10, extra="\n" + hook))
    analysis = page.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run([sys.executable, "-c", analysis], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["step-00000000", "step-00000005", "step-00000010"]
    assert lines[-1].endswith("[1. 1. 1. 1.]")
    assert not lines[0].endswith("[1. 1. 1. 1.]")
