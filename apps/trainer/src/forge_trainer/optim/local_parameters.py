"""Optimizers of our own: a rule for each kind of group; new values are kept where the step is finite."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from forge_parallel.tensor import local_part
from torch import Tensor

from forge_trainer.optim.elementwise import COMPILED_ELEMENTS, Formula, foreach, step_compiled

CHUNK_ELEMENTS = 1 << 18
"""A rule that works on each element for itself is given about so many at a time on a CPU: they stay in its
caches, and memory is used again."""

WINDOW_ELEMENTS = 1 << 25
"""And so many on a GPU: a rule computes with about 1 GB, and a kernel takes longer than its start."""


def window_elements(device: torch.device) -> int:
    """How many elements a rule is given at a time."""
    return CHUNK_ELEMENTS if device.type == "cpu" else WINDOW_ELEMENTS


class Window(NamedTuple):
    """Elements of one parameter, of which a rank holds more.

    Attributes:
        elements: of the flat local part.
        last: whether these are the last ones: then numbers of the parameter as a whole are written.
    """

    elements: slice
    last: bool


class LocalParameters:
    """What a rank holds of parameters of one group that have a gradient, for one step.

    Everything is plain local tensors, in float32 (float64 if the parameter is). New values are written with
    `put`, which leaves the old ones, bit for bit, where the step is not finite.

    Attributes:
        steps: [n] how many steps each has taken, this one included.
        in_place: whether a rule may overwrite `values` and what `state` gives, as the step is known to be
            finite; see `update`.
        first: where in the flat local part of its only parameter a window begins; 0 without one.

    Args:
        optimizer: whose state it is.
        finite: [] bool; None where it is known to be true.
        parameters: with gradients.
        window: of the only parameter.
        compiled: whether `apply` steps the only parameter by compiled code.
    """

    def __init__(
        self,
        optimizer: LocalOptimizer,
        finite: Tensor | None,
        parameters: Sequence[Tensor],
        window: Window | None = None,
        compiled: bool = False,
    ) -> None:
        self._states, self._finite, self._window = optimizer.state, finite, window
        self._compiled = compiled
        self.in_place = finite is None
        self.first = 0 if window is None else window.elements.start
        self.parameters = list(parameters)
        self.wide = [torch.promote_types(p.dtype, torch.float32) for p in self.parameters]
        for parameter in self.parameters:
            if "step" not in self._states[parameter]:
                self._states[parameter]["step"] = torch.zeros((), device=parameter.device)
        self.steps = torch.stack([self._states[p]["step"] for p in self.parameters]) + 1

    @property
    def found_inf(self) -> Tensor | None:
        """[] float32, 1 where the step must change nothing, for torch's fused kernels; see `in_place`."""
        return None if self._finite is None else self._finite.logical_not().float()

    @cached_property
    def values(self) -> list[Tensor]:
        """Of the parameters."""
        return self._widened(self._parts(self.parameters))

    @cached_property
    def grads(self) -> list[Tensor]:
        """Of the parameters; a rule that is done with them may delete them."""
        return self._widened(self._parts(p.grad for p in self.parameters))

    def update(self, name: str, targets: list[Tensor], *arguments: Any) -> list[Tensor]:
        """One of torch's operations on lists; in place where the old values are not needed any more.

        Args:
            name: of the operation, without `_`.
            targets: `values`, what `state` gave, or what was made of them.
            arguments: of the operation.
        """
        if self.in_place:
            foreach(f"{name}_", targets, *arguments)
            return targets
        return foreach(name, targets, *arguments)

    def state(
        self, name: str, dtype: torch.dtype | None = None, start: list[Tensor] | None = None
    ) -> list[Tensor]:
        """State of the parameters, laid out like them.

        Args:
            name: under which it is saved.
            dtype: it is kept in; None for that of the parameters, at least float32.
            start: `values`, where these are its first values; zeros, if absent.
        """
        return self._widened(self._kept(name, dtype, start is not None))

    def apply(self, formula: Formula, states: Mapping[str, bool], *numbers: float | Sequence[Tensor]) -> None:
        """Put the new values and states that a formula for each element gives; the step is counted.

        Args:
            formula: see `Formula`.
            states: names of states, and whether one begins as the values, not as zeros.
            numbers: further arguments of the formula: one for all parameters, or from `each`.
        """
        kept = [self._kept(name, start=starts_as_values) for name, starts_as_values in states.items()]
        lists = [self._parts(self.parameters), self._parts(p.grad for p in self.parameters), *kept]
        if self._compiled:
            (tensors,) = zip(*lists, strict=True)
            step_compiled(formula, self._finite, self.wide[0], tensors, numbers)
        else:
            new = formula(self.update, *map(self._widened, lists), *numbers)
            for targets, values in zip([lists[0], *kept], new, strict=True):
                self._keep(targets, values)
        self.put("step", self.steps.unbind())

    def scalars(self, name: str) -> Tensor:
        """[n] one number a parameter, float64, at first 0."""
        for parameter in self.parameters:
            if name not in self._states[parameter]:
                zero = torch.zeros((), dtype=torch.float64, device=parameter.device)
                self._states[parameter][name] = zero
        return torch.stack([self._states[parameter][name] for parameter in self.parameters])

    def each(self, numbers: Tensor) -> list[Tensor]:
        """[n] one number a parameter -> [] each, in the dtype in which its parameter is computed."""
        if len({*self.wide}) == 1:
            return list(numbers.to(self.wide[0]).unbind())
        return [number.to(wide) for number, wide in zip(numbers.unbind(), self.wide, strict=True)]

    def put(self, name: str, new: list[Tensor] | tuple[Tensor, ...]) -> None:
        """New values of some state, which are not used again: they become whatever memory is at hand."""
        targets, values = [], []
        for parameter, value in zip(self.parameters, new, strict=True):
            kept = self._states[parameter][name]
            if kept.ndim or parameter.ndim == 0 or self._window is None or self._window.last:
                targets.append(self._part(kept))
                values.append(value)
        self._keep(targets, values)

    def put_values(self, new: list[Tensor], rounded: Callable[[int, Tensor], Tensor] | None = None) -> None:
        """New values of the parameters, which are not used again; the step is counted.

        Args:
            new: one a parameter.
            rounded: from the index of a parameter and its new values to those in its dtype.
        """
        if rounded is not None:
            new = [rounded(index, value) for index, value in enumerate(new)]
        self._keep(self._parts(self.parameters), new)
        self.put("step", self.steps.unbind())

    def _kept(self, name: str, dtype: torch.dtype | None = None, start: bool = False) -> list[Tensor]:
        """The parts of a state, in the dtype in which it is kept."""
        for index, parameter in enumerate(self.parameters):
            if name not in (state := self._states[parameter]):
                state[name] = torch.zeros_like(
                    parameter, dtype=dtype or self.wide[index], requires_grad=False
                )
                if start:
                    # of all of the parameter: other windows of it follow
                    local_part(state[name]).copy_(local_part(parameter))
        return self._parts(self._states[parameter][name] for parameter in self.parameters)

    def _parts(self, tensors: Iterable[Tensor | None]) -> list[Tensor]:
        return [self._part(tensor) for tensor in tensors if tensor is not None]

    def _part(self, tensor: Tensor) -> Tensor:
        part = local_part(tensor)
        return part if self._window is None or not part.ndim else part.view(-1)[self._window.elements]

    def _keep(self, targets: list[Tensor], new: list[Tensor]) -> None:
        moved = [pair for pair in zip(targets, new, strict=True) if _place(pair[0]) != _place(pair[1])]
        if not moved:
            return
        targets, new = map(list, zip(*moved, strict=True))
        if self._finite is None:
            foreach("copy_", targets, new)
        else:
            new = [value.to(target.dtype) for target, value in zip(targets, new, strict=True)]
            _copy_if(self._finite, targets, new)

    def _widened(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.to(wide) for tensor, wide in zip(tensors, self.wide, strict=True)]


def _place(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor begins in memory, of fake tensors too."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _copy_if(wanted: Tensor, targets: list[Tensor], new: list[Tensor]) -> None:
    """Copy `new`, or leave the bits of `targets`, as [] bool says on the device; `new` is overwritten.

    As integers, target + (new - target) * wanted is exact, whatever the bits mean, and needs no memory.
    """
    alike: dict[int, list[int]] = {}
    for index, target in enumerate(targets):
        if target.numel():
            alike.setdefault(target.element_size(), []).append(index)
    for size, members in alike.items():
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        kept, change = ([x[i].view(integer) for i in members] for x in (targets, new))
        foreach("sub_", change, kept)
        foreach("mul_", change, wanted.to(integer))
        foreach("add_", kept, change)


Rule = Callable[[LocalParameters, Mapping[str, Any]], None]
"""Takes a step of one group, whose entries it is given."""


class SharedRule(Protocol):
    """Takes a step together with other ranks, for the same parameters: missing gradients are zero."""

    def portions(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Which parameters are taken at a time; the same on all ranks."""
        ...

    def take(self, portions: Iterator[LocalParameters], group: Mapping[str, Any]) -> None:
        """Take a step of one group; `portions` come one after the other. Collective."""
        ...


class LocalOptimizer(torch.optim.Optimizer):
    """Takes each group by the rule of its kind; all state belongs to parameters and is laid out like them.

    Knows the `found_inf` protocol: a step that is not finite changes nothing, without waiting for the device.

    Args:
        groups: from `OptimizerConfig.param_groups`.
        rules: by kind.
        elementwise: kinds whose rules work on each element for itself.
        shared: further rules, of other kinds. Where a group is frozen, they take what has gradients.
        compiled: whether elementwise rules step large parameters by compiled code.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rules: Mapping[str, Rule],
        elementwise: Sequence[str] = (),
        shared: Mapping[str, SharedRule] | None = None,
        compiled: bool = False,
    ) -> None:
        # capturable: checkpoints put scalars of the state on the device of their parameter
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "capturable": True})
        self._rules, self._elementwise = dict(rules), frozenset(elementwise)
        self._shared, self._compiled = dict(shared or {}), compiled
        if compiled:
            # in a step a stand-in may be in the place of the compiler (see `without_dynamo`)
            importlib.import_module("torch._dynamo.eval_frame")

    def finite(self) -> Tensor | None:
        """[] bool, false where the step must change nothing; None where it is known to be true.

        On a CPU the flag is read, which waits for nothing.
        """
        found = getattr(self, "found_inf", None)
        if found is None or (found.device.type == "cpu" and not found):
            return None
        return found == 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step. Collective, if a rule is."""
        assert closure is None, "no closure is ever given"
        finite, frozen = self.finite(), getattr(self, "frozen", [False] * len(self.param_groups))
        for group, is_frozen in zip(self.param_groups, frozen, strict=True):
            shared = self._shared.get(group["kind"])
            missing = [parameter for parameter in group["params"] if parameter.grad is None]
            if shared is not None and not is_frozen:
                # whether other ranks have gradients cannot be seen from here: they may wait for this one
                for parameter in missing:
                    parameter.grad = torch.zeros_like(parameter)
            elif len(missing) == len(group["params"]):
                continue
            parameters = [p for p in group["params"] if p.grad is not None]
            if shared is not None:
                portions = shared.portions(parameters)
                shared.take((LocalParameters(self, finite, portion) for portion in portions), group)
                continue
            for held in self._portions(group["kind"], parameters, finite):
                self._rules[group["kind"]](held, group)

    def _portions(
        self, kind: str, parameters: Sequence[Tensor], finite: Tensor | None
    ) -> Iterator[LocalParameters]:
        """A few elements at a time, where that is the same; all parameters together elsewhere."""
        if kind not in self._elementwise:
            yield LocalParameters(self, finite, parameters)
            return
        most = window_elements(parameters[0].device)
        small: list[Tensor] = []
        count = 0
        for parameter in parameters:
            size = local_part(parameter).numel()
            if self._compiled and size >= COMPILED_ELEMENTS and _is_flat(parameter):
                yield LocalParameters(self, finite, [parameter], compiled=True)
                continue
            if size > most and _is_flat(parameter):
                for first in range(0, size, most):
                    window = Window(slice(first, first + most), first + most >= size)
                    yield LocalParameters(self, finite, [parameter], window)
                continue
            if small and count + size > most:
                yield LocalParameters(self, finite, small)
                small, count = [], 0
            small, count = [*small, parameter], count + size
        if small:
            yield LocalParameters(self, finite, small)


def _is_flat(parameter: Tensor) -> bool:
    """Whether parameter and gradient lie in memory as they are written, as state made of them does."""
    assert parameter.grad is not None
    return local_part(parameter).is_contiguous() and local_part(parameter.grad).is_contiguous()
