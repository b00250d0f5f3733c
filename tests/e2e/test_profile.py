"""The profiling hook in the real command: bits, kills, windows, disks that take nothing, refusals."""

import gzip
import json
import signal

import pytest
from runs import losses, records, state

HOOK = """
[hooks.look]
type = "profile"
first_step = {first}
steps = {steps}
every_steps = {every}
"""


def look(first=3, steps=2, every=0):
    return HOOK.format(first=first, steps=steps, every=every)


def profiles(run):
    """The summaries of all windows by their first step; all that is there can be read."""
    found = {}
    for folder in sorted((run / "profile").iterdir()):
        assert sorted(one.name for one in folder.iterdir()) == ["rank-0"], "nothing partial is left"
        names = sorted(one.name for one in (folder / "rank-0").iterdir())
        assert names == ["summary.json", "summary.md", "trace.json.gz"]
        with gzip.open(folder / "rank-0" / "trace.json.gz") as file:
            assert json.load(file)["traceEvents"]
        summary = json.loads((folder / "rank-0" / "summary.json").read_text())
        assert sum(summary["classes_s"].values()) == pytest.approx(summary["step_s"], rel=1e-9)
        found[summary["first_step"]] = summary
    return found


@pytest.mark.slow
def test_killed_run_is_profiled_where_it_goes_on_with_the_same_bits(forge, tiny, tmp_path):
    forge("train", tiny(steps=9, name="plain.toml", root=tmp_path / "plain"))
    cut = tiny(steps=9, extra=look(first=5, steps=3))
    forge.stop_at(cut, 5, signal.SIGKILL, 1)
    forge("train", cut)
    run, plain = tmp_path / "runs" / "tiny", tmp_path / "plain" / "tiny"
    assert losses(run) == losses(plain)
    assert state(run) == state(plain)
    found = profiles(run)
    assert list(found) == [5] and found[5]["steps"] == 3
    assert found[5]["classes_s"]["matmul"] > 0 and found[5]["classes_s"]["attention"] > 0
    assert found[5]["classes_s"]["optimizer"] > 0 and found[5]["idle_s"]["step"] > 0


@pytest.mark.slow
def test_windows_come_again_and_the_last_one_ends_with_the_run(forge, tiny, tmp_path):
    said = forge("train", tiny(steps=8, extra=look(first=2, steps=2, every=3))).stdout
    found = profiles(tmp_path / "runs" / "tiny")
    assert {first: one["steps"] for first, one in found.items()} == {2: 2, 5: 2, 8: 1}
    assert said.count("profiled 2 steps of") == 2 and "profiled 1 steps of" in said


@pytest.mark.slow
def test_profile_that_cannot_be_written_ends_nothing(forge, tiny, tmp_path):
    run = tmp_path / "runs" / "tiny"
    run.mkdir(parents=True)
    (run / "profile").write_text("in the way")
    done = forge("train", tiny(steps=5, extra=look()))
    assert len(losses(run)) == 5
    assert "the profile of step 3 could not be written" in done.stderr


def test_profile_that_could_show_nothing_is_refused(forge, tiny, tmp_path):
    done = forge("train", tiny(steps=8, extra=look(first=9)), check=False)
    assert done.returncode == 78 and "first_step = 9 in a run of 8 steps would write nothing" in done.stderr
    assert not (tmp_path / "runs" / "tiny" / "config.toml").exists()


@pytest.mark.slow
def test_stacks_and_memory_are_in_the_trace_where_they_are_asked_for(forge, tiny, tmp_path):
    forge("train", tiny(steps=3, extra=look(2, 1)), '--hooks.look.details=["stacks","memory"]')
    folder = tmp_path / "runs" / "tiny" / "profile" / "step-00000002" / "rank-0"
    text = gzip.decompress((folder / "trace.json.gz").read_bytes()).decode()
    assert "python_function" in text and '"[memory]"' in text and "Input Dims" not in text


@pytest.mark.slow
def test_times_of_the_device_are_those_of_the_host_on_a_cpu(forge, tiny, tmp_path):
    extra = '[hooks.times]\ntype = "device-time"\nevery_steps = 4\n'
    forge("train", tiny(steps=8, name="plain.toml", root=tmp_path / "plain"))
    forge("train", tiny(steps=8, extra=extra))
    run = tmp_path / "runs" / "tiny"
    assert losses(run) == losses(tmp_path / "plain" / "tiny")
    logged = records(run)
    times = [record for record in logged if "device/step_s" in record]
    assert [record["step"] for record in times] == [4, 8]
    for record in times:
        host = [
            one["time/step_s"] for one in logged if "loss" in one and 0 <= record["step"] - one["step"] < 4
        ]
        device = record["device/step_s"] + record["device/optimizer_s"]
        assert device == pytest.approx(sum(host) / 4, rel=0.2) and record["device/optimizer_s"] > 0
