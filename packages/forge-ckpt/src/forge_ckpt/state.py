"""Model and optimizer as one flat dict of tensors, by parameter name and independent of any layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forge_ckpt.error import CheckpointError
from forge_ckpt.manifest import Entry

MODEL = "model."
OPTIMIZER = "optimizer."


class TrainState:
    """The tensors of a run: `model.<name>` and `optimizer.<kind>.<name>`.

    Args:
        model: parameters and persistent buffers are saved; shared ones once.
        optimizer: any whose state is tensors, one set a parameter; parameters that it does not know are
            skipped.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        # Held from the start: while FSDP2 has gathered a module, the model shows other, temporary parameters.
        self._model_tensors = model_tensors(model)
        self._optimizer = optimizer
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, not copied.

        Raises:
            CheckpointError: the optimizer holds state that is no tensor.
        """
        return self._model_tensors | self._optimizer_tensors()

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for parameter, state in self._optimizer.state.items():
            for kind, value in state.items():
                if not isinstance(value, Tensor):
                    raise CheckpointError(
                        f"{kind!r} of {type(self._optimizer).__name__} is no tensor: {value!r}"
                    )
                found[f"{OPTIMIZER}{kind}.{self._names[parameter]}"] = value
        return found

    def targets(self, held: Mapping[str, Entry]) -> dict[str, Tensor]:
        """The tensors to load a checkpoint into; optimizer state that does not exist yet is made.

        Args:
            held: what the checkpoint holds.

        Raises:
            CheckpointError: it holds optimizer state of a parameter that there is not.
        """
        parameters = {name: parameter for parameter, name in self._names.items()}
        groups = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        for key, entry in held.items():
            if not key.startswith(OPTIMIZER):
                continue
            kind, _, name = key.removeprefix(OPTIMIZER).partition(".")
            parameter = parameters.get(name)
            if parameter is None or parameter not in groups:
                raise CheckpointError(f"the checkpoint has {key}, and the optimizer has no parameter {name}")
            if kind not in self._optimizer.state[parameter]:
                self._optimizer.state[parameter][kind] = _blank(entry, parameter, groups[parameter])
        return self.tensors()


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers as `model.<name>`; shared ones once, under their first name."""
    found: dict[str, Tensor] = {MODEL + name: parameter for name, parameter in model.named_parameters()}
    persistent = model.state_dict(keep_vars=True).keys()
    return found | {MODEL + name: buffer for name, buffer in model.named_buffers() if name in persistent}


def _blank(entry: Entry, parameter: Tensor, group: dict[str, object]) -> Tensor:
    """A tensor for optimizer state: laid out like its parameter if it has its shape, else plain."""
    dtype = getattr(torch, entry.dtype)
    if list(parameter.shape) == entry.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    on_device = bool(group.get("fused") or group.get("capturable"))
    return torch.zeros(entry.shape, dtype=dtype, device=parameter.device if on_device else "cpu")
