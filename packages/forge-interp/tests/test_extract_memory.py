"""How much memory an extraction takes, in a fresh process that has run the model before.

`FORGE_PAYLOAD_MIB=256,512,1024 pytest -s packages/forge-interp/tests/test_extract_memory.py` for other sizes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SIZES = [int(size) for size in os.environ.get("FORGE_PAYLOAD_MIB", "32,128").split(",")]
MIB = 1 << 20

# Resident memory as the kernel counts it, with pages of mapped files; its peak begins anew at the baseline.
SCRIPT = """
import json, os, shutil, sys
from pathlib import Path
import torch
from torch import nn
from forge_interp.extraction.extract import extract_representations

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

torch.set_num_threads(1)
model = nn.Sequential(nn.Embedding(64, 256), *(nn.Linear(256, 256) for _ in range(8)))
sites = [f"{i}:out" for i in range(1, 9)]
folder, *sizes = sys.argv[1:]
for size in [2, *map(int, sizes)]:
    ids = torch.randint(64, (size, 128))  # one MiB a sample
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    store = extract_representations(model, ids, sites, f"{folder}/acts", batch_size=32)
    written = resident("VmHWM") - before
    read = sum(value.nbytes for batch in store.batches(512) for value in batch.values())
    store.export(f"{folder}/acts.npz")
    print(json.dumps([size, read, written, resident("VmHWM") - before]))
    shutil.rmtree(store.path)
"""


def can_forget_peaks() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_extract_takes_little_memory_and_no_more_for_more_data(tmp_path: Path):
    if not can_forget_peaks():
        pytest.skip("needs /proc/self/clear_refs")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), *map(str, SIZES)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, *report = [json.loads(line) for line in text.splitlines()]
    print([(size, written / MIB, both / MIB) for size, _, written, both in report])
    assert [read for _, read, _, _ in report] == [size * MIB for size in SIZES]
    assert all(both < 64 * MIB for *_, both in report), report
    assert report[-1][3] - report[0][3] < 16 * MIB, report
