"""Optimizers of our own: a rule for each kind of group; new values are kept where the step is finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from forge_parallel.tensor import local_part
from torch import Tensor


class Held:
    """What a rank holds of the parameters of one group that have a gradient, for one step.

    Everything is plain local tensors, in float32 (float64 if the parameter is). New values are written with
    `put`, which leaves the old ones, bit for bit, where the step is not finite.

    Attributes:
        values: of the parameters.
        grads: of the parameters.
        steps: [n] how many steps each has taken, this one included.
    """

    def __init__(self, optimizer: HeldOptimizer, group: Mapping[str, Any]) -> None:
        self._states, self._finite = optimizer.state, optimizer.finite()
        self.parameters: list[Tensor] = [p for p in group["params"] if p.grad is not None]
        self.wide = [torch.promote_types(p.dtype, torch.float32) for p in self.parameters]
        self.values = self._widened([local_part(p) for p in self.parameters])
        self.grads = self._widened([local_part(p.grad) for p in self.parameters if p.grad is not None])
        for parameter in self.parameters:
            if "step" not in self._states[parameter]:
                self._states[parameter]["step"] = torch.zeros((), device=parameter.device)
        self.steps = torch.stack([self._states[p]["step"] for p in self.parameters]) + 1

    def state(
        self, name: str, dtype: torch.dtype | None = None, start: list[Tensor] | None = None
    ) -> list[Tensor]:
        """State of the parameters, laid out like them.

        Args:
            name: under which it is saved.
            dtype: it is kept in; None for that of the parameters, at least float32.
            start: its first values; zeros, if there are none.
        """
        kept: list[Tensor] = []
        for index, parameter in enumerate(self.parameters):
            if name not in (state := self._states[parameter]):
                state[name] = torch.zeros_like(
                    parameter, dtype=dtype or self.wide[index], requires_grad=False
                )
                if start is not None:
                    local_part(state[name]).copy_(start[index])
            kept.append(local_part(state[name]))
        return self._widened(kept)

    def scalars(self, name: str) -> Tensor:
        """[n] one number a parameter, float64, at first 0."""
        for parameter in self.parameters:
            if name not in self._states[parameter]:
                zero = torch.zeros((), dtype=torch.float64, device=parameter.device)
                self._states[parameter][name] = zero
        return torch.stack([self._states[parameter][name] for parameter in self.parameters])

    def put(self, name: str, new: list[Tensor] | tuple[Tensor, ...]) -> None:
        """New values of some state."""
        for parameter, value in zip(self.parameters, new, strict=True):
            self._keep(local_part(self._states[parameter][name]), value)

    def put_values(self, new: list[Tensor], rounded: Callable[[int, Tensor], Tensor] | None = None) -> None:
        """New values of the parameters; the step is counted.

        Args:
            new: one a parameter.
            rounded: from the index of a parameter and its new values to those in its dtype.
        """
        for index, (parameter, value) in enumerate(zip(self.parameters, new, strict=True)):
            self._keep(local_part(parameter), value if rounded is None else rounded(index, value))
        self.put("step", self.steps.unbind())

    def _keep(self, target: Tensor, new: Tensor) -> None:
        new = new.to(target.dtype)
        target.copy_(new if self._finite is None else torch.where(self._finite, new, target))

    def _widened(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.to(wide) for tensor, wide in zip(tensors, self.wide, strict=True)]


Rule = Callable[[Held, Mapping[str, Any]], None]
"""Takes a step of one group, whose entries it is given. With an attribute `together = True`, gradients that
are missing count as zero, unless the group is frozen, so that all ranks take it for the same parameters."""


class HeldOptimizer(torch.optim.Optimizer):
    """Takes each group by the rule of its kind; all state belongs to parameters and is laid out like them.

    Knows the `found_inf` protocol: a step that is not finite changes nothing, without waiting for the device.

    Args:
        groups: from `OptimizerConfig.param_groups`.
        rules: by kind.
    """

    _step_supports_amp_scaling = True

    def __init__(self, groups: list[dict[str, Any]], rules: Mapping[str, Rule]) -> None:
        # capturable: checkpoints put scalars of the state on the device of their parameter
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "capturable": True})
        self._rules = dict(rules)

    def finite(self) -> Tensor | None:
        """[] bool, false where the step must change nothing; None where nobody said."""
        found = getattr(self, "found_inf", None)
        return None if found is None else found == 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step. Collective, if a rule is."""
        assert closure is None, "no closure is ever given"
        frozen = getattr(self, "frozen", [False] * len(self.param_groups))
        for group, is_frozen in zip(self.param_groups, frozen, strict=True):
            rule = self._rules[group["kind"]]
            missing = [parameter for parameter in group["params"] if parameter.grad is None]
            if getattr(rule, "together", False) and not is_frozen:
                # whether other ranks have gradients cannot be seen from here: they may wait for this one
                for parameter in missing:
                    parameter.grad = torch.zeros_like(parameter)
            elif len(missing) == len(group["params"]):
                continue
            rule(Held(self, group), group)


def foreach(name: str, *arguments: Any) -> Any:
    """One of torch's operations on lists of tensors, which have no public names."""
    return getattr(torch, f"_foreach_{name}")(*arguments)
