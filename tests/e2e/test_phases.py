"""Signals in every phase: all ranks end alike and as documented, and the next start goes on bit for bit."""

import random
import signal
import socket
from itertools import product
from typing import NamedTuple

import pytest
from forge_ckpt.store import Store
from runs import losses, state

STEPS = 7
PREEMPTED = 85
AT = {"save": 3, "write": 3, "compile": 1, "end": STEPS}
"""The step that a phase is signalled in; step 4 for the others."""
PHASES = ("start", "data", "forward", "backward", "step", "save", "write", "evaluation", "compile", "end")
NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
KEYS = "--checkpoint.every_steps=3", "--eval.every_steps=4", "--data.validation_samples=4"


class Case(NamedTuple):
    """Who is signalled when and how."""

    phase: str
    ranks: int
    signalled: str  # all ranks, or one of them
    workers: int
    repeated: bool

    def __str__(self) -> str:
        how = "again and again" if self.repeated else "once"
        return f"{self.phase}-{self.signalled} of {self.ranks}-{self.workers} workers-{how}"


CASES = [
    Case(phase, ranks, signalled, workers, repeated)
    for phase, (ranks, signalled), workers, repeated in product(
        PHASES, ((1, "all"), (2, "all"), (2, "one")), (0, 2), (False, True)
    )
]
SAMPLE = random.Random(12).sample(CASES, 4)
"""What is tried each time; all of them are slow."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def train(forge, tiny, tmp_path):
    """Runs the job on some ranks, signalled or not, and returns the exit code and the words of each rank."""

    def run(case: Case, name: str, send: bool) -> list[tuple[int, str]]:
        path = tiny(steps=STEPS, name=f"{name}.toml", root=tmp_path / name)
        path.write_text('imports = ["signalled"]\n' + path.read_text())
        keys = [*KEYS, f"--data.workers={case.workers}"]
        if case.phase == "compile":
            keys += ["--compile.enabled=true", "--compile.backend=signalled"]
        port, chooser = free_port(), random.Random(str(case))
        number, one = chooser.choice(NUMBERS), chooser.randrange(case.ranks)
        if case.repeated and number == signal.SIGINT:
            number = signal.SIGTERM  # a second Ctrl-C ends a run at once
        told = (
            f"phase={case.phase} step={AT.get(case.phase, 4)} number={number} every_s={0.01 * case.repeated}"
        )
        ranks = []
        for rank in range(case.ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks, "MASTER_PORT": port}
            environment = {key: str(value) for key, value in place.items()} if case.ranks > 1 else {}
            environment |= {"MASTER_ADDR": "127.0.0.1"}
            if send and (case.signalled == "all" or rank == one):
                environment |= {"FORGE_SIGNAL": told}
            ranks.append(forge.start("train", path, *keys, environment=environment))
        return [rank.wait() for rank in ranks]

    return run


def check(train, tmp_path, case: Case) -> None:
    """Signal, continue, and compare with a run that nothing happens to."""
    run = tmp_path / "runs" / "tiny"
    ended = train(case, "runs", send=True)
    said = "\n".join(words for _, words in ended)
    code = 0 if case.phase == "end" else PREEMPTED
    assert [one for one, _ in ended] == [code] * case.ranks, said
    assert "Traceback" not in said and f"signalled in {case.phase}" in said, said
    steps = Store(run / "checkpoints").steps()
    if case.phase == "start":
        assert not steps and "before the first step" in said
    else:
        at = AT.get(case.phase, 4)
        assert at <= steps[-1] <= at + 1, said  # the step in progress, or the next one if that had begun
        assert Store(run / "checkpoints").newest().world_size == case.ranks
    for name in ("runs", "whole"):
        ended = train(case, name, send=False)
        assert [one for one, _ in ended] == [0] * case.ranks, "\n".join(words for _, words in ended)
    assert state(run) == state(tmp_path / "whole" / "tiny")
    assert losses(run) == losses(tmp_path / "whole" / "tiny")


@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_signal_in_some_phases_ends_as_documented_and_the_run_goes_on(train, tmp_path, case):
    check(train, tmp_path, case)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_signal_in_any_phase_ends_as_documented_and_the_run_goes_on(train, tmp_path, case):
    check(train, tmp_path, case)
