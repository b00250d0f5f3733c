"""The page of `forge report`, and TensorBoard, in a real browser without a head."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest
from forge_trainer.cli import main
from forge_trainer.track.tensorboard import TensorBoard

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking",
    "--enable-logging=stderr", "--virtual-time-budget=5000",
)  # fmt: skip
OFFLINE = ("--host-resolver-rules=MAP * ~NOTFOUND",)
CONFIG = """
[job]
name = "{name}"
root = "runs"
[train]
steps = 400
global_batch = 8
[optimizer]
type = "adamw"
lr = {lr}
"""
HAND = """
<script>
// the hand of somebody who looks at the page
const told = {};
const mouse = (over, type, x) => over.dispatchEvent(new MouseEvent(type, {
  bubbles: true, button: 0, movementX: 9, clientX: over.getBoundingClientRect().left + x,
  clientY: over.getBoundingClientRect().top + 40,
}));
setTimeout(() => {
  const over = plots[0].over, wide = over.getBoundingClientRect().width;
  told.before = plots.map((plot) => [plot.scales.x.min, plot.scales.x.max]);
  mouse(over, "mousemove", wide / 2);
  told.hover = document.querySelector(".chart .u-legend .u-series:nth-child(2) .u-value").textContent;
  mouse(over, "mousedown", wide * 0.25);
  mouse(over, "mousemove", wide * 0.5);
  mouse(over, "mouseup", wide * 0.5);
  setTimeout(() => {
    told.zoomed = plots.map((plot) => [plot.scales.x.min, plot.scales.x.max]);
    document.getElementById("whole").click();
    setTimeout(() => {
      told.whole = plots.map((plot) => [plot.scales.x.min, plot.scales.x.max]);
      document.querySelector(".chart .u-legend .u-series:nth-child(2) .u-label").click();
      told.hidden = !plots[0].series[1].show;
      document.getElementById("over").value = "tokens";
      document.getElementById("over").dispatchEvent(new Event("change"));
      document.querySelectorAll("details").forEach((box) => { box.open = true; });
      document.getElementById("scheme").click();
      setTimeout(() => {
        told.tokens = plots.map((plot) => plot.scales.x.max);
        told.charts = plots.length;
        told.wide = document.documentElement.scrollWidth;
        told.inner = innerWidth;
        told.ink = plots.map((plot) => {
          const { width, height } = plot.ctx.canvas;
          return plot.ctx.getImageData(0, 0, width, height).data.some((value) => value > 0);
        });
        document.documentElement.dataset.told = JSON.stringify(told);
      }, 50);
    }, 50);
  }, 50);
}, 300);
</script>
"""


@pytest.fixture(scope="module")
def browser():
    """Runs a browser on an address, and returns what it said and what the page is in the end."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} (Debian: apt-get install chromium)")

    def open_(address, *flags, width=1280, height=1400):
        with tempfile.TemporaryDirectory() as profile:
            line = [
                found,
                *FLAGS,
                f"--user-data-dir={profile}",
                f"--window-size={width},{height}",
                *flags,
                address,
            ]
            done = subprocess.run(line, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert not re.search(r"CONSOLE.*(Uncaught|Error)", done.stderr), done.stderr
        return done.stdout

    return open_


@pytest.fixture
def runs(tmp_path):
    """Two runs that learnt something, one of which went back."""
    for name, lr in (("one", 1e-3), ("two", 3e-3)):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "config.toml").write_text(CONFIG.format(name=name, lr=lr))
        with (run / "metrics.jsonl").open("w") as file:
            for step in range(1, 401):
                record = {
                    "step": step,
                    "tokens": step * 100,
                    "time": 1e9 + 7 * step,
                    "lr": lr,
                    "grad_norm": 1 + lr,
                }
                record |= {
                    "loss": 2 + 5 * math.exp(-step * lr * 20),
                    "mine/x": step % 7,
                    "tokens_per_s": 100.0,
                }
                file.write(json.dumps(record) + "\n")
    incident = {"kind": "rollback", "to": 100, "first": 150, "end": 152, "why": "<b>spikes</b>", "skip": True}
    (tmp_path / "runs" / "one" / "incidents.jsonl").write_text(json.dumps(incident) + "\n")
    return tmp_path / "runs"


def told(browser, page, **size):
    """What the hand has seen on the page."""
    moved = page.with_name("moved.html")
    moved.write_text(page.read_text().replace("</body>", f"{HAND}</body>"))
    text = browser(moved.as_uri(), "--dump-dom", *OFFLINE, **size)
    assert "data-error" not in text
    found = re.search(r'data-told="([^"]*)"', text)
    assert found, text[-2000:]
    return json.loads(found.group(1).replace("&quot;", '"')), text


@pytest.mark.slow
@pytest.mark.parametrize("which", ["runs", "runs/one"])
def test_page_zooms_and_tells_and_hides_in_a_browser(browser, runs, which):
    assert main(["report", str(runs.parent / which)]) == 0
    seen, text = told(browser, runs.parent / which / "report.html")
    assert seen["before"] == [[1, 400]] * 4, "loss, learning rate, gradient norm, speed"
    assert re.fullmatch(r"\d\.\d+", seen["hover"])
    low, high = seen["zoomed"][0]
    assert low == pytest.approx(1 + 399 * 0.25, abs=5) and high == pytest.approx(1 + 399 * 0.5, abs=5)
    assert all(scale == [low, high] for scale in seen["zoomed"])
    assert seen["whole"] == seen["before"]
    assert seen["hidden"] and set(seen["tokens"]) == {40_000}
    assert seen["charts"] == 5 and all(seen["ink"])
    assert "&lt;b&gt;spikes&lt;/b&gt;" in text and "<b>spikes" not in text
    assert ("What differs" in re.sub("<script.*?</script>", "", text, flags=re.DOTALL)) == (which == "runs")


@pytest.mark.slow
def test_page_fits_a_phone(browser, runs):
    assert main(["report", str(runs)]) == 0
    seen, _ = told(browser, runs / "report.html", width=390, height=800)
    assert seen["inner"] <= 500, "Chromium makes no smaller window"
    assert seen["wide"] <= seen["inner"], "nothing but tables moves sideways"


@pytest.mark.slow
def test_tensorboard_shows_what_was_tracked(browser, tmp_path):
    board = TensorBoard(tmp_path / "tensorboard", 0)
    for step in range(1, 50):
        board.log({"step": step, "tokens": step * 10, "loss": 1 / step, "eval/loss": 2 / step})
    board.close()
    port = 20_000 + os.getpid() % 10_000
    line = [
        sys.executable,
        "-m",
        "tensorboard.main",
        f"--logdir={tmp_path}",
        f"--port={port}",
        "--load_fast=false",
    ]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            address = f"http://localhost:{port}/"
            for _ in range(240):
                try:
                    tags = json.load(urllib.request.urlopen(f"{address}data/plugin/scalars/tags", timeout=5))
                    if tags:
                        break
                except OSError:
                    pass
                time.sleep(0.25)
            assert {"loss", "eval/loss", "tokens"} <= set(tags["tensorboard"])
            text = browser(f"{address}#timeseries", "--dump-dom", "--virtual-time-budget=30000")
        finally:
            server.terminate()
    assert "<tb-webapp" in text and "eval/loss" in text


def test_event_files_hold_what_was_tracked_and_what_was_given_up_is_gone(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "tensorboard"
    for first, last in ((0, 8), (5, 10)):  # the second start goes on from step 5
        board = TensorBoard(folder, first)
        for step in range(first + 1, last + 1):
            board.log(
                {"step": step, "tokens": step * 10, "loss": 1 / step + first, "layers.0/grad": math.nan}
            )
        board.close()
        time.sleep(1.1)  # files are named by the second
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    assert set(read.Tags()["scalars"]) == {"tokens", "loss", "layers.0/grad"}
    found = [(event.step, event.value) for event in read.Scalars("loss")]
    expected = [(s, 1 / s) for s in range(1, 6)] + [(s, 1 / s + 5) for s in range(6, 11)]
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [value for _, value in found] == pytest.approx([value for _, value in expected])
    assert all(math.isnan(event.value) for event in read.Scalars("layers.0/grad"))


def test_page_needs_no_more_than_the_library_and_its_licence():
    folder = Path(sys.modules["forge_trainer.cli"].__file__).parents[1] / "report" / "page"
    assert "MIT" in (folder / "uPlot.LICENSE").read_text()
    assert "uPlot (v1" in (folder / "uPlot.iife.min.js").read_text()[:300]
