"""Runs that are equal bit for bit, and what is said where they need not be."""

import os

import forge_trainer.build
import pytest
import torch
from forge_trainer.cli import main
from forge_trainer.optim import AdamWConfig
from forge_trainer.randomness import WORKSPACE, attention_kernels, deterministic
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


def kernel_of(names):
    """The kernel that attention takes."""
    query = torch.randn(1, 1, 8, 16)
    with attention_kernels(names), torch.profiler.profile() as seen:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    (kernel,) = {
        event.name for event in seen.events() if "attention_" in event.name and "dot" in event.name[8:]
    }
    return kernel


def test_attention_takes_a_kernel_that_is_named():
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert kernel_of([]) == kernel_of(["flash"]) == kernel_of(["flash", "math"]) == flash
    assert kernel_of(["math"]) == "aten::_scaled_dot_product_attention_math"


def test_run_takes_the_kernels_and_the_patience_of_its_configuration(tmp_path, monkeypatch):
    seen = []
    opened, build = forge_trainer.build.process_group, AdamWConfig.build

    def grouped(env, needed, timeout_s, config):
        seen.append(timeout_s)
        return opened(env, needed, timeout_s, config)

    def looked_at(self, *arguments):
        seen.append(torch.backends.cuda.flash_sdp_enabled())
        return build(self, *arguments)

    monkeypatch.setattr(forge_trainer.build, "process_group", grouped)
    monkeypatch.setattr(AdamWConfig, "build", looked_at)
    flags = ["--resilience.collective_timeout_s=99", '--job.attention_kernels=["math"]', *SMALL]
    assert main(["train", RUN, f'--job.root="{tmp_path}"', *flags]) == 0
    assert seen == [99.0, False] and torch.backends.cuda.flash_sdp_enabled()


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
