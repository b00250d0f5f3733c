"""Are a model and a function the same as in the run that is to be continued?"""

from __future__ import annotations

import functools
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from forge_interp.extraction.columns import as_bytes
from forge_interp.hooks.sites import named_modules

_ELEMENTS = 64


def model_fingerprint(model: nn.Module) -> tuple[dict[str, Any], str]:
    """Class, layout and weights of a model, cheaply: of each tensor a few evenly spaced elements are read.

    Returns:
        What is the same on all processes; and a checksum of the tensors of which this process holds a part.
    """
    layout = whole = local = 0
    count = 0
    for name, tensor in _tensors(model):
        text = f"{name} {list(tensor.shape)} {tensor.dtype}"
        layout, count = zlib.crc32(text.encode(), layout), count + tensor.numel()
        if _is_distributed(tensor):
            local = zlib.crc32(as_bytes(_probe(tensor.to_local())), local)  # type: ignore[attr-defined]
        else:
            whole = zlib.crc32(as_bytes(_probe(tensor)), whole)
    kind = type(named_modules(model)[""])
    name = re.sub(r"^FSDP(?=[A-Z])", "", kind.__qualname__) if _is_fsdp(model) else kind.__qualname__
    common = {"class": name, "numbers": count, "layout": f"{layout:08x}", "weights": f"{whole:08x}"}
    return common, f"{local:08x}"


def callable_name(function: Callable[..., Any] | None) -> str | None:
    """Name a function so that another one, or another lambda, has another name.

    What it closes over is not looked at.
    """
    if function is None:
        return None
    if isinstance(function, functools.partial):
        return f"partial({callable_name(function.func)}, {function.args!r}, {function.keywords!r})"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    constants = [c for c in code.co_consts if isinstance(c, int | float | str | bytes | None)]
    text = repr((constants, code.co_names)).encode()
    return f"{name}:{zlib.crc32(code.co_code + text):08x}"


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and the buffers that are saved, by name without wrappers."""
    for name, module in named_modules(model).items():
        saved = module._buffers.keys() - module._non_persistent_buffers_set
        for key, tensor in [*module._parameters.items(), *((k, module._buffers[k]) for k in sorted(saved))]:
            if tensor is not None:
                yield f"{name}.{key}", tensor


def _probe(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    step = max(1, flat.numel() // _ELEMENTS)
    return flat[::step].cpu()


def _is_distributed(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _is_fsdp(model: nn.Module) -> bool:
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(model, module.FSDPModule)


def is_distributed(model: nn.Module) -> bool:
    """Whether this process holds only a part of the model, so that it must run together with others."""
    return any(_is_distributed(parameter) for parameter in model.parameters())
