"""A rank that waits long for its data is named with its host, and nobody is where all are alike."""

import json
import socket

import pytest
from runs import records

SLEEPY = """
import os, time
from forge_trainer.hooks import Hook, HookConfig, hooks

@hooks.register("sleepy")
class SleepyConfig(HookConfig):
    rank: int

    def build(self, run):
        if run.env.rank == self.rank:
            whole = type(run.data.loader).__iter__
            def late(loader):
                for batch in whole(loader):
                    time.sleep(0.2)
                    yield batch
            type(run.data.loader).__iter__ = late
        return Hook()
"""


@pytest.mark.slow
@pytest.mark.dist
def test_rank_with_slow_data_is_named(forge, tiny, tmp_path):
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    path, run = (
        tiny(steps=16, extra='\n[hooks.sleepy]\ntype = "sleepy"\nrank = 1\n'),
        tmp_path / "runs" / "tiny",
    )
    path.write_text('imports = ["sleepy"]\n' + path.read_text())
    said = forge("train", path, "--resilience.compare_speed_every_steps=4", ranks=2).stderr
    found = [json.loads(line) for line in (run / "incidents.jsonl").read_text().splitlines()]
    assert [one["kind"] for one in found if "'data'" in one["why"]] == ["hardware"], said
    (why,) = [one["why"] for one in found if "'data'" in one["why"]]
    assert f"rank 1 on {socket.gethostname()} is slow at 'data'" in why and why in said
    scores = [record["straggler/data"] for record in records(run) if "straggler/data" in record]
    assert len(scores) == 4 and all(score < 0.5 for score in scores)
    assert "straggler/probe" in json.dumps(records(run))
