import io
import sys

import pytest
import torch
from forge_interp.causal.attribution import attribution_patching
from forge_interp.causal.patching import activation_patching
from forge_interp.causal.path_patching import path_patching
from forge_interp.extraction.extract import extract_representations
from forge_interp.progress import progress
from torch import nn


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_draws_on_a_terminal_and_passes_the_items_through(monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    assert list(progress("abc", 3, "letters", True)) == ["a", "b", "c"]
    assert stream.getvalue().rsplit("\r", 1)[1].startswith("letters: 100%")
    assert sum(progress(iter(range(5)), None, "numbers")) == 10
    assert "numbers: 5" in stream.getvalue()


@pytest.mark.parametrize(("stream", "enabled"), [(io.StringIO(), True), (Terminal(), False), (None, True)])
def test_progress_is_silent_without_a_terminal_or_when_switched_off(monkeypatch, stream, enabled):
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress([1, 2], 2, "quiet", enabled)) == [1, 2]
    assert stream is None or stream.getvalue() == ""


def test_progress_passes_the_items_through_without_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    assert list(progress("abc", 3, "letters")) == ["a", "b", "c"] and stream.getvalue() == ""


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
    "extract 3/3": lambda **bar: extract_representations(
        MODEL, [*torch.ones(6, 4)], ["0"], batch_size=2, tokens=None, mask=None, **bar
    ),
}


@pytest.mark.parametrize("expected", LOOPS)
def test_long_loops_draw_a_bar_that_counts_their_steps(monkeypatch, expected):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    LOOPS[expected](progress=False)
    assert stream.getvalue() == ""
    LOOPS[expected]()
    label, _, count = expected.rpartition(" ")
    last = stream.getvalue().rsplit("\r", 1)[1]
    assert last.startswith(f"{label}: 100%") and f" {count} [" in last
