"""How much memory an extraction takes, in a fresh process that has run the model before."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, resource, sys
import torch
from torch import nn
from forge_interp.extraction.extract import extract_representations

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

torch.set_num_threads(1)
model = nn.Sequential(nn.Embedding(64, 256), *(nn.Linear(256, 256) for _ in range(8)))
ids = torch.randint(64, (256, 128))
with torch.no_grad():
    model(ids[:32])
before, report = peak(), []
for dataset, name in ((ids[:64], "small"), (ids, "large")):
    for suffix in (".npz", ".safetensors", ".zarr", ""):
        out = f"{sys.argv[1]}/{name}{suffix}"
        store = extract_representations(model, dataset, [f"{i}:out" for i in range(1, 9)], out, batch_size=32)
        report.append([f"{name}{suffix}", len(store) * store.rows * 256 * 4, peak() - before])
print(json.dumps(report))
"""


@pytest.mark.slow
def test_extract_takes_little_memory_and_no_more_for_more_data(tmp_path: Path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [payload for _, payload, _ in report] == [2 << 25] * 4 + [8 << 25] * 4
    peaks = [peak for _, _, peak in report]
    assert peaks[-1] < 64 << 20, report
    assert peaks[-1] - peaks[3] < 24 << 20, report
