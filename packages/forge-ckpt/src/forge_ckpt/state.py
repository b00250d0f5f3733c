"""Model and optimizer as one flat dict of tensors, by parameter name and independent of any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forge_ckpt.error import CheckpointError
from forge_ckpt.layout import Entry
from forge_ckpt.manifest import Snapshot, copied
from forge_ckpt.values import from_json, to_json

MODEL = "model."
OPTIMIZER = "optimizer."
STATE = "state."
GROUP = "group."


class TrainState:
    """The state of a run: tensors `model.<name>` and `optimizer.<kind>.<name>`, and plain values.

    Plain values are `state.<kind>.<name>`, the optimizer state of a parameter that is no tensor, and
    `group.<entry>.<name>`, the entries in the group of a parameter that have changed since it was made (a
    step count, a sum of weights): when restored, the other entries stay as configured.

    With a pipeline, each rank holds some parts of the model, and its state is that of these parts. A store
    merges the states of all ranks, so that other ranks may hold other parts when it is loaded.

    Make it before the first step, from a new optimizer.

    Args:
        parts: the parts of the model that this rank holds, with the names of their parameters in the whole
            model. Parameters and persistent buffers are saved; shared ones once.
        optimizer: with state that is tensors or plain values; parameters that it does not know are skipped.
        is_copy: whether another rank also has a parameter and saves it; here it is loaded only.

    Raises:
        CheckpointError: a name is in two parts, or a module keeps extra state, which is not saved.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizer: Optimizer,
        is_copy: Callable[[Tensor], bool] = lambda parameter: False,
    ) -> None:
        # Held from the start: while FSDP2 has gathered a module, the model shows other, temporary parameters.
        self._names: dict[Tensor, str] = {}
        for part in parts:
            for name, parameter in part.named_parameters():
                self._names.setdefault(parameter, name)
        self._parts, self._is_copy = list(parts), is_copy
        _require_no_extra_state(parts)
        _require_distinct([*self._names.values(), *(name for p in parts for name in persistent_buffers(p))])
        self._optimizer = optimizer
        self._was_new = not optimizer.state
        self._made_with = [_made_with(optimizer, group) for group in optimizer.param_groups]
        self._blanks: list[tuple[Tensor, str]] = []

    def capture(self, meta: Mapping[str, Any] | None = None, copy: bool = True) -> Snapshot:
        """Return a snapshot of the state. Waits for the device.

        Args:
            meta: other data of this moment, as JSON; copied.
            copy: copy tensors to host memory, so that training may go on; without it they are the live
                tensors, for a save that training waits for.

        Raises:
            CheckpointError: the optimizer holds something that is neither tensor nor plain value, or has
                parameter groups that it did not have when this was made.
        """
        tensors, values = self._tensors(), self._values()
        elsewhere = {name for parameter, name in self._names.items() if self._is_copy(parameter)}
        if elsewhere:
            tensors = {key: x for key, x in tensors.items() if _parameter_of(key) not in elsewhere}
            values = {key: x for key, x in values.items() if key.split(".", 2)[2] not in elsewhere}
        if copy:
            tensors = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
        return Snapshot(tensors, copied(meta or {}), values)

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore the optimizer state that is no tensor; unsaved values are as constructed.

        Args:
            values: of the checkpoint whose tensors were loaded. Values of parameters that this rank does not
                hold, and other values than the optimizer's, are ignored.

        Raises:
            CheckpointError: parameters that share a group now come from groups that differ.
        """
        self._blanks.clear()  # they have their values now
        of_group: dict[str, dict[str, Any]] = {}
        parameters = {name: parameter for parameter, name in self._names.items()}
        for key, value in values.items():
            where, kind, name = key.split(".", 2)
            if where + "." == GROUP:
                of_group.setdefault(name, {})[kind] = value
            elif where + "." == STATE and name in parameters:
                self._optimizer.state[parameters[name]][kind] = from_json(value)
        for group, made_with in self._groups():
            entries = _entries(of_group, self._names_in(group))
            for key, value in entries.items():
                _set(group, key, from_json(value))
            if not self._was_new or not self._names_in(group):
                continue
            for key in made_with.keys() & group.keys() - entries.keys():
                if not made_with[key].is_of(group[key]):
                    _set(group, key, made_with[key].restored())

    def targets(self, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
        """Return the tensors to load a checkpoint into; missing optimizer state is created.

        To go back to a checkpoint without some state, remove that state from the optimizer first.

        Args:
            entries: the tensors of the checkpoint; optimizer state of parameters that this rank does not
                have, or does not train, is ignored.
        """
        for parameter, kind in self._blanks:  # another checkpoint, which was not loaded after all, held them
            self._optimizer.state[parameter].pop(kind, None)
        self._blanks.clear()
        parameters = {name: parameter for parameter, name in self._names.items()}
        groups = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        for key, entry in entries.items():
            if not key.startswith(OPTIMIZER):
                continue
            kind, _, name = key.removeprefix(OPTIMIZER).partition(".")
            parameter = parameters.get(name)
            if parameter is None or parameter not in groups:
                continue
            if kind not in self._optimizer.state[parameter]:
                self._optimizer.state[parameter][kind] = _blank(entry, parameter, groups[parameter])
                self._blanks.append((parameter, kind))
        return self._tensors()

    def _tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, not copied."""
        found = {MODEL + name: parameter for parameter, name in self._names.items()}
        for part in self._parts:
            found |= {MODEL + name: buffer for name, buffer in persistent_buffers(part).items()}
        kept = self._kept()
        return found | {OPTIMIZER + key: value for key, value in kept.items() if isinstance(value, Tensor)}

    def _values(self) -> dict[str, Any]:
        """Return the optimizer state that is no tensor, as JSON."""
        owner = type(self._optimizer).__name__
        values = {STATE + key: value for key, value in self._kept().items() if not isinstance(value, Tensor)}
        for group, made_with in self._groups():
            for key, value in group.items():
                if key != "params" and not (key in made_with and made_with[key].is_of(value)):
                    _require_kind(key, owner)
                    values |= {f"{GROUP}{key}.{name}": value for name in self._names_in(group)}
        return {key: to_json(value, f"{key.split('.')[1]!r} of {owner}") for key, value in values.items()}

    def _kept(self) -> dict[str, Any]:
        """The state of all parameters as `<kind>.<name>`."""
        unknown = [key for key in self._optimizer.state if key not in self._names]
        if unknown:
            raise CheckpointError(
                f"{type(self._optimizer).__name__} holds state of {unknown[0]!s:.80}, which is no parameter "
                "of the model; expected an optimizer of the parameters that the model has now"
            )
        kept = {}
        for parameter, state in self._optimizer.state.items():
            for kind, value in state.items():
                _require_kind(kind, type(self._optimizer).__name__)
                kept[f"{kind}.{self._names[parameter]}"] = value
        return kept

    def _groups(self) -> list[tuple[dict[str, Any], dict[str, _Mark]]]:
        """Each parameter group with its initial entries."""
        groups, owner = self._optimizer.param_groups, type(self._optimizer).__name__
        if len(groups) != len(self._made_with):
            raise CheckpointError(
                f"{owner} has {len(groups)} parameter groups, and had {len(self._made_with)}; make "
                "TrainState once they are complete"
            )
        return list(zip(groups, self._made_with, strict=True))

    def _names_in(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[parameter] for parameter in group["params"] if parameter in self._names]


def _parameter_of(key: str) -> str:
    """Return the name of the parameter, or buffer, that a tensor belongs to."""
    if key.startswith(MODEL):
        return key.removeprefix(MODEL)
    return key.removeprefix(OPTIMIZER).partition(".")[2]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers as `model.<name>`; shared ones once, under their first name."""
    found: dict[str, Tensor] = dict(model.named_parameters()) | persistent_buffers(model)
    return {MODEL + name: tensor for name, tensor in found.items()}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are saved, by name; shared ones once, under their first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        kept = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, buffer in kept.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _require_kind(kind: object, owner: str) -> None:
    """Raise CheckpointError if the name of an optimizer state is ambiguous."""
    if not isinstance(kind, str) or "." in kind:
        raise CheckpointError(f"{owner} keeps something named {kind!r}; expected text without a dot")


def _require_no_extra_state(parts: Sequence[nn.Module]) -> None:
    """Raise CheckpointError if a module has state that is neither parameter nor buffer."""
    for part in parts:
        for name, module in part.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise CheckpointError(
                    f"{name or 'the model'} ({type(module).__name__}) has get_extra_state, which is not "
                    "saved; expected all of its state in parameters and persistent buffers"
                )


def _require_distinct(names: Sequence[str]) -> None:
    """Raise CheckpointError if two tensors have one name."""
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise CheckpointError(
            f"two parts of the model have {', '.join(twice[:5])}; expected parts whose names are those of "
            "the whole model, each in one part"
        )


class _Mark:
    """The initial value of a group entry, to detect changes, in place too, and to restore it."""

    def __init__(self, value: object) -> None:
        try:
            self._kept = "json", to_json(value, "")
        except CheckpointError:
            self._kept = "object", _copy_of(value)

    def is_of(self, value: object) -> bool:
        """Whether a value equals this one; by identity if it has neither JSON nor equality."""
        kind, kept = self._kept
        try:
            return to_json(value, "") == kept if kind == "json" else value is kept or bool(value == kept)
        except (CheckpointError, ValueError, RuntimeError):  # of many elements: to_json tells of them
            return False

    def restored(self) -> Any:
        """Return the initial value."""
        kind, kept = self._kept
        return from_json(kept) if kind == "json" else _copy_of(kept)


def _copy_of(value: Any) -> Any:
    """Return a copy that shows whether the value has changed in place; the value itself if it has none."""
    try:
        copy = deepcopy(value)
        return copy if copy == value else value
    except Exception:  # whatever its own ways to copy and to compare raise
        return value


def _made_with(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, _Mark]:
    """Return the entries of a group before the first step; for an optimizer with state, its defaults."""
    if not optimizer.state:
        return {key: _Mark(value) for key, value in group.items() if key != "params"}
    return {key: _Mark(value) for key, value in optimizer.defaults.items() if not isinstance(value, Tensor)}


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an entry; a tensor stays on its device."""
    if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
        group[key] = group[key].new_tensor(value.tolist(), dtype=value.dtype)
    else:
        group[key] = value


def _entries(saved: Mapping[str, dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Return the saved group entries of these parameters, which must agree."""
    sources = {name: saved.get(name, {}) for name in names}
    for key in sorted({key for entries in sources.values() for key in entries}):
        seen: dict[str, str] = {}
        for name, entries in sources.items():
            seen.setdefault(repr(entries.get(key)), name)
        if len(seen) > 1:
            raise CheckpointError(
                f"optimizer groups that were apart are one now, and {key!r} is {' and '.join(seen)} in "
                f"those of {' and '.join(seen.values())}; keep parameters with different values in groups "
                "of their own"
            )
    return next(iter(sources.values()), {})


def _blank(entry: Entry, parameter: Tensor, group: dict[str, object]) -> Tensor:
    """Return a tensor for optimizer state: laid out like its parameter if it has its shape, else plain.

    Step counts are on the CPU, where torch's optimizers keep them unless they run on a GPU as a whole.
    """
    dtype = getattr(torch, entry.dtype)
    if tuple(parameter.shape) == entry.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    on_device = bool(entry.shape or group.get("fused") or group.get("capturable"))
    return torch.zeros(entry.shape, dtype=dtype, device=parameter.device if on_device else "cpu")
