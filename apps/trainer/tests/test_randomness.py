"""Runs that are equal bit for bit, and what is said where they need not be."""

import os

import pytest
import torch
from forge_trainer.cli import main
from forge_trainer.optim import AdamWConfig
from forge_trainer.randomness import WORKSPACE, deterministic
from forge_trainer.steps.repeated import meaning_of_repetition

RUN = "configs/runs/debug.toml"
SMALL = ["--train.steps=3", "--schedule.warmup_steps=1", "--eval.every_steps=0", "--data.max_tokens=32"]


@pytest.fixture
def seen(monkeypatch) -> list[bool]:
    """Whether algorithms were deterministic when the optimizer was built."""
    found: list[bool] = []
    build = AdamWConfig.build

    def looked_at(self, *arguments):
        found.append(torch.are_deterministic_algorithms_enabled())
        return build(self, *arguments)

    monkeypatch.setattr(AdamWConfig, "build", looked_at)
    monkeypatch.delenv(WORKSPACE, raising=False)
    return found


@pytest.mark.parametrize("wanted", [False, True])
def test_run_is_deterministic_as_the_key_says_and_leaves_torch_as_it_was(wanted, seen, tmp_path, monkeypatch):
    flags = [f'--job.root="{tmp_path}"', f"--job.deterministic={str(wanted).lower()}", *SMALL]
    assert main(["train", RUN, *flags]) == 0
    assert seen == [wanted] and (WORKSPACE in os.environ) == wanted
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_operation_without_a_deterministic_kernel_is_refused_by_its_name():
    place, value = torch.zeros(2, dtype=torch.int64), torch.ones(2)
    with deterministic(True), pytest.raises(RuntimeError, match="put_"):
        torch.zeros(3).put_(place, value)
    torch.zeros(3).put_(place, value)


@pytest.mark.parametrize(
    ("finite", "exact", "said"),
    [
        (True, True, "suspect the hardware"),
        (True, False, "job.deterministic = true only hardware"),
        (False, True, "and not the hardware"),
        (False, False, "and not the hardware"),
    ],
)
def test_repeated_step_blames_hardware_only_where_kernels_give_the_same_bits(finite, exact, said):
    assert said in meaning_of_repetition(finite, exact)
    assert ("suspect the hardware" in meaning_of_repetition(finite, exact)) == (finite and exact)
