"""Five sizes predict the loss of the sixth, trained with the same command."""

import csv
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIXTH = """
name = "sixth"
base = "{base}"
root = "{root}"
[[points]]
name = "s6"
rules.tokens = 524288.0
schedule.warmup_steps = 20
model.dim = 288
model.num_layers = 3
model.init_std = 0.1
model.ffn.dim = 784
model.attention.num_heads = 9
model.scaling.base_dim = 64
"""


def rows(root):
    return list(csv.DictReader((root / "results.csv").read_text().splitlines()))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_ladder_of_five_sizes_predicts_the_sixth_within_three_percent(forge, tmp_path):
    base = ROOT / "configs" / "sweeps" / "small.toml"
    ladder, sixth = tmp_path / "ladder.toml", tmp_path / "sixth.toml"
    text = (ROOT / "configs" / "studies" / "ladder.toml").read_text()
    ladder.write_text(f'root = "{tmp_path / "ladder"}"\n' + text.replace("../sweeps/small.toml", str(base)))
    sixth.write_text(SIXTH.format(base=base, root=tmp_path / "sixth"))
    forge("study", ladder, "--jobs", "2")
    forge("study", ladder, "--analyse")
    forge("study", sixth)
    (reached,) = rows(tmp_path / "sixth")
    found = json.loads((tmp_path / "ladder" / "analysis" / "analysis.json").read_text())["law"]
    (predicted,) = found["predictions"]
    assert predicted["parameters"] == pytest.approx(float(reached["parameters"]), rel=0.01)
    assert predicted["loss"] == pytest.approx(float(reached["eval/loss"]), rel=0.03)
