"""The commands of a newcomer on this device: train, eval, generate and export of all debug runs at once.

Writes commands.json: of each command the exit code (124: it took too long), its seconds and its last line.
Exits with 1 where a command failed.

Run: python benchmarks/gpu/commands.py [--steps 2] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import ROOT, write

RUNS = ("debug", "vlm_debug_joint", "vlm_debug_cross", "vlm_debug_mot", "vlm_debug_moma")


def called(*words: str, limit_s: float) -> dict[str, Any]:
    """Run one command of forge to its end."""
    begun = time.perf_counter()
    line = [sys.executable, "-m", "forge_trainer", *words]
    with tempfile.TemporaryFile("w+") as said_to:
        # a session of its own: what it has started ends with it
        done = subprocess.Popen(
            line, stdout=said_to, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        try:
            code = done.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            done.wait()
            code = 124
        said_to.seek(0)
        said = said_to.read()
    last = said.strip().splitlines()[-1:] or [""]
    print(f"{code} {' '.join(words)}\n{said[-1500:] if code else last[0]}", flush=True)
    return {"code": code, "seconds": round(time.perf_counter() - begun, 1), "last": last[0]}


def day(name: str, root: Path, steps: int | None, limit_s: float) -> dict[str, Any]:
    """What is done with one run."""
    fewer = [] if steps is None else [f"--train.steps={steps}", "--schedule.warmup_steps=1"]
    folder = str(root / name)
    found = {
        "train": called("train", f"configs/runs/{name}.toml", f'--job.root="{root}"', *fewer, limit_s=limit_s)
    }
    if found["train"]["code"] == 0:
        found["eval"] = called("eval", folder, limit_s=limit_s)
        prompt = ["--prompt", "def ", "--max-new-tokens", "16"]
        if name != "debug":
            image = root / f"{name}.png"
            drawn(image)
            prompt = ["--image", str(image), "--prompt", "What colour?", "--max-new-tokens", "8"]
        found["generate"] = called("generate", folder, *prompt, limit_s=limit_s)
        if name == "debug":
            found["compiled"] = called("generate", folder, *prompt, "--compile", limit_s=limit_s)
            found["export"] = called("export", folder, str(root / "exported"), limit_s=limit_s)
    return found


def drawn(path: Path) -> None:
    """A red square."""
    from PIL import Image

    picture = Image.new("RGB", (32, 32), "black")
    picture.paste((255, 0, 0), (8, 8, 24, 24))
    picture.save(path)


def main() -> None:
    """Run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, help="of each run; absent means what its file says")
    parser.add_argument("--runs", nargs="+", default=RUNS)
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--limit", type=float, default=150, help="seconds of a command")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.at_once) as pool:
        root = Path(folder)
        days = pool.map(lambda name: day(name, root, chosen.steps, chosen.limit), chosen.runs)
        found = dict(zip(chosen.runs, days, strict=True))
    write("commands", found, chosen.out)
    failed = [f"{run} {what}" for run, of in found.items() for what, one in of.items() if one["code"]]
    print(f"failed: {', '.join(failed) or 'none'}")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
