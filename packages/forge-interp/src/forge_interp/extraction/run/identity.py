"""Would a call compute the same as an earlier one, perhaps in another process?

A model computes the same if its weights and buffers are the same, and if the same samples have the same
rows. A different row shows in the rows themselves, whatever its cause.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forge_interp.attention.placement import is_dtensor
from forge_interp.extraction.run.parts import as_bytes, dtype_name
from forge_interp.hooks.engine.sharding import is_unit
from forge_interp.hooks.sites import named_modules, unwrapped

_SUM_WIDTH = 1024
_NUM_GROUPS = 32
_TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
_NARROW_TOLERANCE = 3e-2  # of 16 bits and fewer, and of numbers that depend on a comparison


def model_identity(model: nn.Module) -> dict[str, Any]:
    """Summarize a model: classes, printed settings, checksums of weights and buffers. Collective if sharded.

    The result does not depend on how the model is sharded. Every weight is read, on its device; weights on
    the meta device (offloaded by accelerate) are not: only the rows of samples show their changes.
    """
    for module in filter(is_unit, model.modules()):
        module.reshard()  # type: ignore[operator]  # what a forward pass left gathered may be cast
    checksum = functools.cache(_checksum)  # modules may share weights
    layout: list[Any] = []
    sums = {"weights": 0, "buffers": 0}
    count = 0
    for name, module in named_modules(model).items():
        module = unwrapped(module)
        kind = type(module).__bases__[1] if is_unit(module) else type(module)  # FSDP2 puts one in front
        layout.append([name, kind.__qualname__, re.sub(r" at 0x[0-9a-f]+", "", module.extra_repr())])
        for held, tensors in (("weights", module._parameters), ("buffers", module._buffers)):
            for key, tensor in ((key, tensor) for key, tensor in tensors.items() if tensor is not None):
                layout.append([name, key, list(tensor.shape), tensor.dtype])
                sums[held] = zlib.crc32(checksum(tensor), sums[held])
                count += tensor.numel()
    found = {key: f"{crc:08x}" for key, crc in sums.items()}
    crc = zlib.crc32(repr(layout).encode())
    return found | {"numbers": count, "class": layout[0][1], "layout": f"{crc:08x}"}


def names_of(functions: Any) -> Any:
    """Return the name of a function, or of each in a mapping; strings and None stay."""
    if isinstance(functions, Mapping):
        return {key: names_of(function) for key, function in functions.items()}
    if functions is None or isinstance(functions, str):
        return functions
    inner = functions.func if isinstance(functions, functools.partial) else functions
    return getattr(inner, "__qualname__", type(inner).__qualname__)


def is_distributed(model: nn.Module) -> bool:
    """Whether this process holds only a part of the model and must run together with others."""
    return any(map(is_dtensor, model.parameters()))


def digest(rows: Tensor) -> dict[str, Any]:
    """Summarize 32 groups of rows by numbers that rounding changes little.

    Group g has the rows g, g + 32, ...; its numbers are its norm, and its sum with fixed signs of rows and
    columns, so that their order counts.
    """
    flat = rows.detach().reshape(len(rows), rows[:1].numel())
    of_rows, of_columns = (_signs(size).to(rows.device) for size in flat.shape)
    norms, sums = [], []
    for group in range(min(_NUM_GROUPS, len(flat))):
        part = flat[group::_NUM_GROUPS].double().nan_to_num(0, 0, 0)
        norms.append(part.norm().item())
        sums.append((of_rows[group::_NUM_GROUPS] @ part @ of_columns).item())
    return {
        "dtype": dtype_name(rows.dtype),
        "shape": list(rows.shape),
        "not_finite": int((~flat.isfinite()).sum()),
        "norms": norms,
        "sums": sums,
    }


def _signs(size: int) -> Tensor:
    """Draw [size] float64 of 1 and -1, the same in each process."""
    return torch.randint(2, (size,), generator=torch.Generator().manual_seed(0)).double() * 2 - 1


def is_same_but_for_rounding(first: Any, second: Any) -> bool:
    """Whether two outputs (digests by site) can come from the same model."""
    if not isinstance(first, Mapping) or not isinstance(second, Mapping) or first.keys() != second.keys():
        return first == second
    if "sums" not in first:
        return all(is_same_but_for_rounding(first[key], second[key]) for key in first)
    if any(first[key] != second[key] for key in ("dtype", "shape", "not_finite")):
        return False
    tolerance = _TOLERANCES.get(first["dtype"], _NARROW_TOLERANCE)
    groups = zip(*(of[key] for key in ("norms", "sums") for of in (first, second)), strict=True)
    return all(
        abs(norm - other_norm) <= tolerance / 4 * norm and abs(total - other_total) <= tolerance * norm
        for norm, other_norm, total, other_total in groups
    )


def numerics() -> dict[str, Any]:
    """Return the settings of torch that change numbers."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return {
        "autocast": {kind: str(torch.get_autocast_dtype(kind)) for kind in kinds},
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def _checksum(tensor: Tensor) -> bytes:
    """Sum all bits as integers, by rows and by columns of 1024, so that their order counts."""
    return b"".join(
        bytes(as_bytes(part)) for plain in _plain(tensor.detach()) for part in _sums(plain.flatten())
    )


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors of which a tensor of any kind consists; meta tensors have none."""
    if is_dtensor(tensor):
        tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass, such as the quantized ones of torchao
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from _plain(getattr(tensor, name))
    elif tensor.is_quantized:
        yield tensor.dequantize()
    elif not tensor.is_meta:
        yield tensor if tensor.layout is torch.strided else tensor.to_dense()


def _sums(flat: Tensor) -> tuple[Tensor, ...]:
    raw = flat.view(torch.uint8)
    square = len(raw) - len(raw) % (8 * _SUM_WIDTH)
    table = raw[:square].clone() if raw.storage_offset() % 8 else raw[:square]
    words = table.view(torch.int64).view(-1, _SUM_WIDTH)
    return words.sum(0), words.sum(1), raw[square:]
