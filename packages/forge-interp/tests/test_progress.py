import io
import sys
from types import SimpleNamespace

import pytest
import torch
from forge_interp.causal.attribution import attribution_patching
from forge_interp.causal.patching import activation_patching
from forge_interp.causal.path_patching import path_patching
from forge_interp.lenses.tuned_lens import TunedLens
from forge_interp.progress import progress
from torch import nn


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_draws_on_a_terminal_and_passes_the_items_through(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    assert list(progress("abc", 3, "letters", True)) == ["a", "b", "c"]
    last = stream.getvalue().rsplit("\r", 1)[1]
    assert last.startswith("\x1b[Kletters ##########")
    assert "3/3" in last
    assert last.endswith("\n")


def test_progress_draws_on_the_way_and_tells_what_is_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    module = sys.modules["forge_interp.progress"]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for _ in progress(range(4), 4, "slow"):
        now[0] += 2
    drawn = stream.getvalue().split("\r")[1:]
    assert [line.split(" ", 2)[2].strip() for line in drawn] == [
        "1/4 [2 s, 6 s left]",
        "2/4 [4 s, 4 s left]",
        "3/4 [6 s, 2 s left]",
        "4/4 [8 s, 0 s left]",
        "4/4 [8 s, 0 s left]",
    ]


def test_progress_counts_without_a_total(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    assert sum(progress(iter(range(5)), None, "numbers")) == 10
    assert "numbers 5 [" in stream.getvalue()


@pytest.mark.parametrize(("stream", "enabled"), [(io.StringIO(), True), (Terminal(), False), (None, True)])
def test_progress_is_silent_without_a_terminal_or_when_switched_off(monkeypatch, stream, enabled):
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress([1, 2], 2, "quiet", enabled)) == [1, 2]
    assert stream is None or stream.getvalue() == ""


def test_progress_ends_its_line_when_the_loop_breaks(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    with pytest.raises(RuntimeError):
        for item in progress(range(9), 9, "broken"):
            if item == 2:
                raise RuntimeError
    assert "2/9" in stream.getvalue()
    assert stream.getvalue().endswith("\n")


MODEL = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
PAIR = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).unbind()
LOOPS = {
    "activation patching 6/6": lambda **bar: activation_patching(
        MODEL, *PAIR, ["0", "1"], torch.sum, where={"a": 0, "b": 1, "c": 2}, **bar
    ),
    "path patching 2/2": lambda **bar: path_patching(
        MODEL, *PAIR, ["0", "1"], "2:in", torch.sum, frozen="1", **bar
    ),
    "integrated gradients 3/3": lambda **bar: attribution_patching(
        MODEL, *PAIR, ["0", "1", "2"], torch.sum, steps=2, **bar
    ),
    "tuned lens 5/5": lambda **bar: TunedLens(MODEL, "0", norm=nn.Identity(), head="2", check=False).fit(
        PAIR, steps=5, **bar
    ),
}


@pytest.mark.parametrize("expected", LOOPS)
def test_long_loops_draw_a_bar_that_counts_their_steps(monkeypatch, expected):
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    LOOPS[expected](progress=False)
    assert stream.getvalue() == ""
    LOOPS[expected]()
    label, _, count = expected.rpartition(" ")
    last = stream.getvalue().rsplit("\r", 1)[1]
    assert last.startswith(f"\x1b[K{label} #") and f" {count} [" in last
