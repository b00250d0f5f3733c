"""Are a model and a function the same as in the run that is to be continued?"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.attention.placement import is_dtensor
from forge_interp.extraction.columns import as_bytes
from forge_interp.hooks.sharding import is_unit
from forge_interp.hooks.sites import named_modules

_PROBES = 64
_PLAIN = (bool, int, float, complex, str, bytes, slice, range, torch.dtype, torch.device, type(None))


def model_fingerprint(model: nn.Module) -> dict[str, Any]:
    """Classes, settings and weights of a model, the same however it is sharded. Collective if it is.

    Every weight is read, on its device: a change of a single one is seen. Buffers that are not saved and
    attributes that `extra_repr` does not show are not looked at.
    """
    for module in filter(is_unit, model.modules()):
        module.reshard()  # type: ignore[operator]  # what a forward pass left gathered may be cast
    layout = weights = count = 0
    known: dict[Tensor, bytes] = {}  # of weights that modules share
    for name, module in _modules(model):
        settings = re.sub(r" at 0x[0-9a-f]+", "", module.extra_repr())
        layout = zlib.crc32(f"{name} {_class_of(module)} {settings}".encode(), layout)
    for name, tensor in _tensors(model):
        layout = zlib.crc32(f"{name} {list(tensor.shape)} {tensor.dtype}".encode(), layout)
        known[tensor] = known[tensor] if tensor in known else _checksum(tensor)
        weights = zlib.crc32(known[tensor], weights)
        count += tensor.numel()
    kind = _class_of(next(_modules(model))[1])
    return {"class": kind, "numbers": count, "layout": f"{layout:08x}", "weights": f"{weights:08x}"}


def callable_name(function: Callable[..., Any] | None) -> str | None:
    """Name a function so that another one, or the same around other numbers, has another name.

    Looks at code, default arguments, what it closes over, and the attributes of a callable object; not at
    globals, nor at objects inside that are neither numbers nor functions.
    """
    if function is None:
        return None
    text = _identity(function, frozenset())
    inner = function.func if isinstance(function, functools.partial) else function
    return f"{getattr(inner, '__qualname__', type(inner).__qualname__)}:{zlib.crc32(text.encode()):08x}"


def is_distributed(model: nn.Module) -> bool:
    """Whether this process holds only a part of the model, so that it must run together with others."""
    return any(is_dtensor(parameter) for parameter in model.parameters())


def _identity(value: Any, outer: frozenset[int]) -> str:
    """A text that is the same in every process for equal values, and as a rule another for others."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if id(value) in outer:
        return "itself"
    kind, parts = type(value).__qualname__, _parts(value)
    inside = outer | {id(value)}
    return kind if parts is None else f"{kind}({','.join(_identity(part, inside) for part in parts)})"


def _parts(value: Any) -> Iterable[Any] | None:
    """What a value consists of; None where that is not looked at."""
    if isinstance(value, Tensor):
        return [list(value.shape), value.dtype, zlib.crc32(as_bytes(value))]
    if isinstance(value, np.ndarray | np.generic):
        return [list(value.shape), str(value.dtype), zlib.crc32(value.tobytes())]
    if isinstance(value, Mapping):
        return [item for key in sorted(value, key=repr) for item in (key, value[key])]
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, CodeType):
        return [value.co_code, value.co_names, value.co_consts]
    return _parts_of(value) if callable(value) else None


def _parts_of(function: Any) -> list[Any]:
    if isinstance(function, nn.Module):
        return sorted(model_fingerprint(function).items())
    if isinstance(function, functools.partial):
        return [function.func, function.args, function.keywords]
    name = getattr(function, "__qualname__", "")
    code = getattr(function, "__code__", None)
    if code is None:
        return [name, {} if isinstance(function, type) or name else getattr(function, "__dict__", {})]
    closed = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    owner = getattr(function, "__self__", None)
    owner = owner if isinstance(owner, nn.Module) else type(owner).__qualname__
    return [name, code, function.__defaults__, function.__kwdefaults__, closed, owner]


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by name, the model first; what a wrapper holds stands for it."""
    for name, module in named_modules(model).items():
        yield name, getattr(module, "_checkpoint_wrapped_module", module)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and the buffers that are saved, by name without wrappers."""
    for name, module in _modules(model):
        saved = module._buffers.keys() - module._non_persistent_buffers_set
        for key, tensor in [*module._parameters.items(), *((k, module._buffers[k]) for k in sorted(saved))]:
            if tensor is not None:
                yield f"{name}.{key}", tensor


def _checksum(tensor: Tensor) -> bytes:
    """The sum of all bits as integers, and some evenly spaced elements, of which the order counts."""
    whole = tensor.detach()
    if is_dtensor(whole):
        whole = whole.to(whole.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    if whole.is_meta or not whole.numel():
        return b""
    flat = whole.flatten()
    raw = flat.view(torch.uint8)
    words = raw[: len(raw) // 8 * 8]
    words = words.clone() if words.storage_offset() % 8 else words
    total = int(words.view(torch.int64).sum())
    probes = [flat[:: max(1, len(flat) // _PROBES)], raw[len(words) :]]
    return b"".join([total.to_bytes(8, "little", signed=True), *(bytes(as_bytes(probe)) for probe in probes)])


def _class_of(module: nn.Module) -> str:
    """The class name; FSDP2 puts its own in front."""
    name = type(module).__qualname__
    return re.sub(r"^FSDP(?=[A-Z])", "", name) if is_unit(module) else name
