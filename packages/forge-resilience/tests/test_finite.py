import copy

import pytest
import torch
from forge_resilience.finite import FiniteGuard, step_if_finite
from forge_resilience.verdict import Verdict
from torch import nn


def stepped(optimizer_class, bad, **options):
    """A model and optimizer after three good steps, their state then, and after one with a bad gradient."""
    model = nn.Linear(4, 4)
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    for value in (1.0, 2.0, 3.0, bad):
        if value is bad:
            before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model(torch.ones(2, 4)).sum().backward()
        if value is bad:
            model.weight.grad[0, 0] = bad
        finite = torch.isfinite(model.weight.grad.sum())
        step_if_finite(optimizer, finite)
        optimizer.zero_grad()
    return before, (model.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [(torch.optim.AdamW, {"fused": True}), (torch.optim.AdamW, {"foreach": True}), (torch.optim.Adagrad, {})],
)
def test_step_if_finite_changes_no_bit_when_gradient_is_not_finite(optimizer_class, options, bad):
    (model, optimizer), (model_after, optimizer_after) = stepped(optimizer_class, bad, **options)
    for name, value in model.items():
        assert torch.equal(value, model_after[name])
    for index, state in optimizer["state"].items():
        for kind, value in state.items():
            assert torch.equal(
                torch.as_tensor(value), torch.as_tensor(optimizer_after["state"][index][kind])
            ), kind


def test_step_if_finite_steps_when_gradient_is_finite():
    before, after = stepped(torch.optim.AdamW, 5.0, fused=True)
    assert not torch.equal(before[0]["weight"], after[0]["weight"])
    assert after[1]["state"][0]["step"] == 4


def test_guard_aborts_after_patience_and_only_when_it_reads():
    guard = FiniteGuard(patience=3, read_every_steps=5)
    bad = torch.tensor(False)
    verdicts = [guard.verdict(step, bad) for step in range(1, 6)]
    assert verdicts == [Verdict.CONTINUE] * 4 + [Verdict.ABORT]


def test_guard_forgives_bad_steps_that_are_not_in_a_row():
    guard = FiniteGuard(patience=3, read_every_steps=1)
    flags = [False, False, True, False, False, True]
    verdicts = [guard.verdict(step, torch.tensor(flag)) for step, flag in enumerate(flags, 1)]
    assert set(verdicts) == {Verdict.CONTINUE}
