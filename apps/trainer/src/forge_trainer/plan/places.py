"""Follows the place of a step: module, micro-batch, and forward or backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from forge_trainer.plan.compiled import MatmulInputs


class Place(NamedTuple):
    """A place of a step.

    Attributes:
        phase: `forward`, `backward` or `update`.
        micro: the micro-batch: `first`, `middle` or `last`; empty outside of micro-batches.
        module: name of the module; blocks of the second half count from the end: `layers.0`, `layers.-1`.
    """

    phase: str
    micro: str
    module: str


LOSS = "loss"


class Places:
    """Follows the place of a step by hooks on modules and tensors, without changing any result.

    Attributes:
        now: the present place.
        loss: whether the loss or the logits are being computed.
        compiled: gets the progress of passes; None if no block is compiled.
    """

    def __init__(self) -> None:
        self.compiled: MatmulInputs | None = None
        self._module, self._stack = "", list[str]()
        self._phase, self._micro, self.loss = "forward", "", False

    @property
    def now(self) -> Place:
        """The present place of the step."""
        phase = "backward" if self._phase == "forward" and in_backward() else self._phase
        return Place(phase, self._micro, self._module)

    def begin(self, phase: str, micro: str = "") -> None:
        """Enter a phase or a micro-batch."""
        if self.compiled is not None:
            self.compiled.over()
        self._phase, self._micro, self._module = phase, micro, ""
        self._stack.clear()

    def follow(self, model: nn.Module, blocks: Iterable[str], prefix: str = "") -> dict[str, str]:
        """Hook the blocks of a model, their direct children, and the modules beside blocks.

        Args:
            model: the parallelized model.
            blocks: names of the blocks, in order.
            prefix: prefix of the names of places.

        Returns:
            The label of each block, without the prefix.
        """
        short = shortened(list(blocks))
        for name, module in model.named_modules():
            if name and (label := label_of(name, short)) is not None:
                self._hook(module, prefix + label)
        return short

    def around(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a loss so that its computation is a place."""

        def run(*arguments: Any, **options: Any) -> Any:
            before, self.loss, self._module = self._module, True, LOSS
            try:
                return loss(*arguments, **options)
            finally:
                self.loss, self._module = False, before

        return run

    def _hook(self, module: nn.Module, label: str) -> None:
        def enter(*_: Any) -> None:
            self._stack.append(self._module)
            self._module = label
            if self.compiled is not None and not in_backward():
                self.compiled.entered(label)

        def leave(_: nn.Module, __: Any, out: Any) -> None:
            if self._stack:
                self._module = self._stack.pop()
            for tensor in _tensors(out):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(back)

        def back(_: Tensor) -> None:
            self._module = label
            if self.compiled is not None:
                self.compiled.came_back(label)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)


def in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def shortened(blocks: list[str]) -> dict[str, str]:
    """Return names of blocks that do not depend on their number: the second half counts from the end."""
    families: dict[str, list[str]] = {}
    for name in blocks:
        families.setdefault(name.rpartition(".")[0], []).append(name)
    short: dict[str, str] = {}
    for family, names in families.items():
        for index, name in enumerate(names):
            place = index if index < len(names) // 2 else index - len(names)
            short[name] = f"{family}.{place}"
    return short


def label_of(name: str, short: dict[str, str]) -> str | None:
    """Return the label of a module; None if it is no separate place."""
    block = next((one for one in short if name == one or name.startswith(f"{one}.")), None)
    if block is not None:
        inner = name[len(block) :]
        return short[block] + inner if inner.count(".") <= 1 else None
    inside = any(one.startswith(f"{name}.") for one in short)
    return name if not inside and name.count(".") <= 1 else None


def _tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, tuple | list):
        return [one for part in out for one in _tensors(part)]
    return []
