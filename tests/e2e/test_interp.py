"""forge-interp on runs of ours: an exported checkpoint, and recording while a run trains."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from forge_interp import capture
from forge_interp.weights import load_weights
from forge_model.families import LLAMA
from forge_model.init import initialize
from forge_trainer.inspect_run import load_model
from forge_trainer.run_dir import open_job

OURS = ["layers.*:out", "layers.*.attention:attn.pattern"]
THEIRS = ["model.layers.*:out", "model.layers.*.self_attn:attn.pattern"]

ALONE = """
import sys
import numpy as np
from forge_interp import capture
from forge_interp.weights import load_weights
from transformers import AutoConfig, AutoModelForCausalLM
import torch

folder, tokens, out = sys.argv[1:]
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
load_weights(model, folder)
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


def test_exported_run_is_the_same_inside_by_every_way_of_reading_it(forge, tiny, tmp_path):
    transformers = pytest.importorskip("transformers")
    forge("train", tiny(steps=6))
    run, folder = tmp_path / "runs" / "tiny", tmp_path / "hf"
    forge("export", run, folder)
    tokens = torch.randint(272, (3, 32), generator=torch.Generator().manual_seed(0))
    own, _ = load_model(open_job(run))
    expected = seen(own, OURS, tokens)
    assert len(expected) == 4 and expected[0].std() > 0.01

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    blank = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    load_weights(blank.eval(), folder)
    again = open_job(run).model.build()
    initialize(again, 1)
    load_weights(again, folder, rename={LLAMA.hf_key(name): name for name, _ in again.named_parameters()})

    np.save(tmp_path / "tokens.npy", tokens.numpy())
    arguments = [str(folder), str(tmp_path / "tokens.npy"), str(tmp_path / "alone.npz")]
    script = ALONE.format(sites=THEIRS)
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    alone = np.load(tmp_path / "alone.npz")

    for found in (
        seen(theirs, THEIRS, tokens),
        seen(blank, THEIRS, tokens),
        seen(again, OURS, tokens),
        [alone[key] for key in sorted(alone.files)],
    ):
        for value, reference in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, reference, rtol=1e-5, atol=1e-5)
