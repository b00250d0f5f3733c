"""Where the time of a run went, over a kill and a restart; and how often it saves by itself."""

import json
import signal
import time

import pytest
from forge_ckpt.store import Store
from forge_resilience.goodput import add_up
from forge_trainer.hooks.ledger import read_ledger
from runs import records


@pytest.mark.slow
def test_ledger_of_a_killed_run_adds_up_to_its_wall_time(forge, tiny, tmp_path):
    path, run = tiny(steps=90), tmp_path / "runs" / "tiny"
    keys = ("--checkpoint.every_steps=35",)
    forge("status", tmp_path, check=False)  # from here on, processes start warm
    begin = time.time()
    forge.stop_at(path, 60, signal.SIGKILL, 1, *keys)
    time.sleep(2)
    forge("train", path, *keys)
    end = time.time()
    found = add_up(read_ledger(run))
    assert (found.starts, found.failures) == (2, 1)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s, rel=0.01)
    assert found.wall_s == pytest.approx(end - begin, abs=1.5)
    assert 2 < found.seconds["down"] < 4  # with what comes after the last line of a start that is killed
    assert all(seconds > -0.01 * found.wall_s for seconds in found.seconds.values()), found
    # of the first start, steps 36 to 60 were lost, of the second, none
    assert found.seconds["lost"] > 0 and found.seconds["start"] > 0 and found.seconds["productive"] > 0
    assert abs(found.seconds["other"]) < 0.1 * found.wall_s
    assert records(run)[-2]["goodput"] == pytest.approx(found.ratio, abs=0.1)
    told = forge("status", run).stdout
    assert f"goodput       {found.ratio:.1%} of " in told and "in 2 starts were steps that lasted" in told
    listed = forge("status", run.parent).stdout.splitlines()
    assert [line.split()[:2] for line in listed] == [["run", "step"], ["tiny", "90/90"]]
    assert listed[1].endswith("complete")


def test_checkpoints_come_as_often_as_it_is_worth_it(forge, tiny, tmp_path):
    forge("train", tiny(steps=60), "--checkpoint.every_steps=auto", "--checkpoint.keep=50")
    steps = Store(tmp_path / "runs" / "tiny" / "checkpoints").steps()
    # a save costs milliseconds and failures are rare: nothing after the first but the end
    assert steps == [20, 60]
    stop_s = [line.stop_s for line in read_ledger(tmp_path / "runs" / "tiny")]
    assert all(30 < s < 300 for s in stop_s) and stop_s, "the margin of the last save, a step and the hooks"
    assert json.loads((tmp_path / "runs" / "tiny" / "exit.json").read_text())["code"] == 0
