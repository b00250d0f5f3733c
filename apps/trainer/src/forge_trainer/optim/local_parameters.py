"""The base of our own optimizers: a rule for each kind of group; non-finite steps change nothing."""

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
"""The approximate number of elements that an element-wise rule gets at a time on a CPU: they stay in its
caches, and memory is reused."""

WINDOW_ELEMENTS = 1 << 25
"""The same number on a GPU: a rule computes with about 1 GB, and a kernel takes longer than its start."""


def window_elements(device: torch.device) -> int:
    """Return how many elements an element-wise rule gets at a time."""
    return CHUNK_ELEMENTS if device.type == "cpu" else WINDOW_ELEMENTS


class Window(NamedTuple):
    """A range of elements of one parameter, for parameters that are larger than a window.

    Attributes:
        elements: range in the flat local shard.
        last: whether this is the last window; only then scalars of the parameter are written.
    """

    elements: slice
    last: bool


class LocalParameters:
    """A rank's shards of the parameters of one group that have a gradient, for one step.

    All tensors are plain local tensors, in float32 (float64 if the parameter is). `put` writes new values; it
    leaves the old values, bit for bit, if the step is not finite.

    Attributes:
        steps: [n] number of steps of each parameter, this one included.
        in_place: whether a rule may overwrite `values` and the results of `state`, because the step is known
            to be finite; see `update`.
        first: start of the window in the flat local shard of the only parameter; 0 without a window.

    Args:
        optimizer: the optimizer with the state.
        finite: [] bool; None if it is known to be true.
        parameters: parameters with gradients.
        window: window of the only parameter.
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
        """[] float32, 1 if the step must change nothing, for torch's fused kernels; None if it is finite."""
        return None if self._finite is None else self._finite.logical_not().float()

    @cached_property
    def values(self) -> list[Tensor]:
        """The values of the parameters."""
        return self._widened(self._parts(self.parameters))

    @cached_property
    def grads(self) -> list[Tensor]:
        """The gradients of the parameters; a rule may delete them after use."""
        return self._widened(self._parts(p.grad for p in self.parameters))

    def update(self, name: str, targets: list[Tensor], *arguments: Any) -> list[Tensor]:
        """Call one of torch's operations on lists, in place if the old values are not needed any more.

        Args:
            name: name of the operation, without `_`.
            targets: `values`, a result of `state`, or results computed from them.
            arguments: arguments of the operation.
        """
        if self.in_place:
            foreach(f"{name}_", targets, *arguments)
            return targets
        return foreach(name, targets, *arguments)

    def state(
        self, name: str, dtype: torch.dtype | None = None, start: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Return a state of the parameters, with their layout.

        Args:
            name: name of the state in checkpoints.
            dtype: dtype of the stored state; None for the dtype of the parameters, at least float32.
            start: `values`, if the state begins with them; default zeros.
        """
        return self._widened(self._kept(name, dtype, start is not None))

    def apply(self, formula: Formula, states: Mapping[str, bool], *numbers: float | Sequence[Tensor]) -> None:
        """Apply an element-wise formula, write the new values and states, and count the step.

        Args:
            formula: see `Formula`.
            states: names of states, and whether each begins with the values instead of zeros.
            numbers: further arguments of the formula: a number for all parameters, or a result of `each`.
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
        """Return [n] float64, a stored number for each parameter, at first 0."""
        for parameter in self.parameters:
            if name not in self._states[parameter]:
                zero = torch.zeros((), dtype=torch.float64, device=parameter.device)
                self._states[parameter][name] = zero
        return torch.stack([self._states[parameter][name] for parameter in self.parameters])

    def each(self, numbers: Tensor) -> list[Tensor]:
        """Split [n] numbers, one for each parameter, into [] each, in the dtype of its computation."""
        if len({*self.wide}) == 1:
            return list(numbers.to(self.wide[0]).unbind())
        return [number.to(wide) for number, wide in zip(numbers.unbind(), self.wide, strict=True)]

    def put(self, name: str, new: list[Tensor] | tuple[Tensor, ...]) -> None:
        """Write new values of a state; `new` may be overwritten and must not be used again."""
        targets, values = [], []
        for parameter, value in zip(self.parameters, new, strict=True):
            kept = self._states[parameter][name]
            if kept.ndim or parameter.ndim == 0 or self._window is None or self._window.last:
                targets.append(self._part(kept))
                values.append(value)
        self._keep(targets, values)

    def put_values(self, new: list[Tensor], rounded: Callable[[int, Tensor], Tensor] | None = None) -> None:
        """Write new values of the parameters, and count the step; `new` must not be used again.

        Args:
            new: new values, one tensor for each parameter.
            rounded: rounds new values to the dtype of their parameter, given the index of the parameter.
        """
        if rounded is not None:
            new = [rounded(index, value) for index, value in enumerate(new)]
        self._keep(self._parts(self.parameters), new)
        self.put("step", self.steps.unbind())

    def _kept(self, name: str, dtype: torch.dtype | None = None, start: bool = False) -> list[Tensor]:
        """Return the shards of a state in their stored dtype; create the state at its first use."""
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
    """Return where a tensor begins in memory; works for fake tensors, too."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _copy_if(wanted: Tensor, targets: list[Tensor], new: list[Tensor]) -> None:
    """Copy `new` to `targets` if `wanted`, a [] bool on the device, else leave all bits; overwrites `new`.

    On the bits as integers, target + (new - target) * wanted is exact, and needs no memory.
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
"""Takes a step of one group; the second argument is the entries of the group."""


class SharedRule(Protocol):
    """A rule that steps the same parameters on all ranks together; a missing gradient counts as zero."""

    def portions(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Divide parameters into portions that take a step together; the same on all ranks."""
        ...

    def take(self, portions: Iterator[LocalParameters], group: Mapping[str, Any]) -> None:
        """Take a step of one group, whose `portions` come one after the other. Collective."""
        ...


class LocalOptimizer(torch.optim.Optimizer):
    """An optimizer that applies a rule to each group by its kind; all state has the layout of its parameter.

    It supports the `found_inf` protocol: a step that is not finite changes nothing, without a device sync.

    Args:
        groups: result of `OptimizerConfig.param_groups`.
        rules: rules by kind.
        elementwise: kinds whose rules are element-wise.
        shared: shared rules of other kinds. In a frozen group they step only parameters with gradients.
        compiled: whether element-wise rules step large parameters by compiled code.
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
        """Return [] bool, false if the step must change nothing; None if it is known to be finite.

        On a CPU the flag is read, without waiting for a device.
        """
        found = getattr(self, "found_inf", None)
        if found is None or (found.device.type == "cpu" and not found):
            return None
        return found == 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step. Collective, if a rule is collective."""
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
            for local_params in self._portions(group["kind"], parameters, finite):
                self._rules[group["kind"]](local_params, group)

    def _portions(
        self, kind: str, parameters: Sequence[Tensor], finite: Tensor | None
    ) -> Iterator[LocalParameters]:
        """Yield windows of elements for element-wise rules; for other rules all parameters together."""
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
    """Return whether parameter and gradient are contiguous in memory, and so is state like them."""
    assert parameter.grad is not None
    return local_part(parameter).is_contiguous() and local_part(parameter.grad).is_contiguous()
