import io
import sys

import pytest
from forge_interp.progress import progress


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
