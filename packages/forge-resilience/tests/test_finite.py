import copy

import pytest
import torch
from forge_resilience.finite import BuffersBefore, NonFiniteCounter, step_if_finite
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


def judged(guard, flags, **options):
    """The verdict after each step."""
    verdicts = []
    for step, flag in enumerate(flags, 1):
        guard.count(torch.tensor(flag))
        verdicts.append(guard.verdict(step, last=step == options.get("until")))
    return verdicts


def test_guard_aborts_after_patience_and_only_when_it_reads():
    guard = NonFiniteCounter(patience=3, read_every_steps=5)
    assert judged(guard, [False] * 5) == [Verdict.CONTINUE] * 4 + [Verdict.ABORT]


def test_guard_remembers_bad_steps_in_a_row_until_it_reads():
    guard = NonFiniteCounter(patience=3, read_every_steps=5)
    assert judged(guard, [False, False, False, True, True])[-1] == Verdict.ABORT


def test_guard_forgives_bad_steps_that_are_not_in_a_row():
    guard = NonFiniteCounter(patience=3, read_every_steps=1)
    assert set(judged(guard, [False, False, True, False, False, True])) == {Verdict.CONTINUE}


def test_guard_reads_when_asked_to():
    guard = NonFiniteCounter(patience=2, read_every_steps=100)
    for step in (1, 2):
        guard.count(torch.tensor(False))
        assert guard.verdict(step) == Verdict.CONTINUE
    assert guard.verdict(2, read=True) == Verdict.ABORT


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([True] * 4, Verdict.CONTINUE),
        ([True, True, True, False], Verdict.CONTINUE),
        ([True, True, False, False], Verdict.ABORT),
        ([False, False, True, False], Verdict.CONTINUE),
    ],
)
def test_guard_does_not_let_a_run_end_in_bad_steps(flags, expected):
    assert judged(NonFiniteCounter(patience=10, read_every_steps=100), flags, until=4)[-1] == expected


@pytest.mark.parametrize("cut", range(1, 8))
def test_guard_decides_the_same_when_restarted_at_any_step(cut):
    flags = [False, True, False, False, False, False, True, True]
    whole = NonFiniteCounter(patience=4, read_every_steps=8)
    expected = judged(whole, flags)
    first, second = (NonFiniteCounter(patience=4, read_every_steps=8) for _ in range(2))
    judged(first, flags[:cut])
    second.load_state(first.state())
    for flag in flags[cut:]:
        second.count(torch.tensor(flag))
    assert second.verdict(len(flags)) == expected[-1] == Verdict.ABORT
    assert second.state() == whole.state() and second.skipped() == 5


def test_guard_that_has_aborted_aborts_again_after_a_restart_unless_given_more_patience():
    guard = NonFiniteCounter(patience=2, read_every_steps=100)
    judged(guard, [False, False, True])
    for patience, expected in ((2, Verdict.ABORT), (3, Verdict.CONTINUE)):
        again = NonFiniteCounter(patience, read_every_steps=100)
        again.load_state(guard.state())
        assert judged(again, [True]) == [expected]


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("bias", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.bias = self.bias + x.mean(0)  # bound anew
        return self.norm(x) + self.bias


@pytest.mark.parametrize("bad", [1.0, float("nan"), float("inf")])
def test_held_buffers_keep_what_they_were_when_a_step_is_skipped(bad):
    model = Router()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = copy.deepcopy(model.state_dict())
    held = BuffersBefore(model)
    out = model(torch.tensor([[1.0, 2.0, bad], [3.0, 4.0, 5.0]]))
    out.sum().backward()
    model.bias += bad  # between backward and optimizer
    step_if_finite(optimizer, torch.isfinite(out.sum()), held)
    same = {name: torch.equal(value, before[name]) for name, value in model.state_dict().items()}
    assert set(same) == {
        "bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    expected = bad != 1.0
    assert {name: value for name, value in same.items() if name != "norm.weight"} == dict.fromkeys(
        same.keys() - {"norm.weight"}, expected
    )


@pytest.mark.parametrize(
    ("flags", "row"), [("gbbg", (1, 3)), ("bbgbbb", (3, 6)), ("bbbgbb", (0, 3)), ("gbg", (1, 2))]
)
def test_guard_names_the_steps_of_the_longest_row(flags, row):
    guard = NonFiniteCounter(patience=10, read_every_steps=1)
    for step, flag in enumerate(flags, 1):
        guard.count(torch.tensor(flag == "g"), step)
    assert guard.worst_steps() == row
