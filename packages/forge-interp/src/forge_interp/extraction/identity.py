"""Would a call compute the same as an earlier one, by another process perhaps?

Values are described by texts that are equal for equal values, in every process: weights and arrays by check
sums, functions and classes of ours by their code and what they read, those of installed libraries by their
names, any other object by what pickle would keep of it.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import inspect
import re
import sysconfig
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forge_interp.attention.placement import is_dtensor
from forge_interp.errors import InterpError
from forge_interp.extraction.parts import as_bytes
from forge_interp.hooks.sharding import is_unit
from forge_interp.hooks.sites import named_modules

_PLAIN = (bool, int, float, complex, str, bytes, slice, range, torch.dtype, torch.device, type(None))
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_LIBRARY_FOLDERS = ("site-packages", "dist-packages")
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {
    "_compiled_call_impl",
    "_is_hf_initialized",
    "_is_torch_compile",
}
# What a configuration of Hugging Face says of where it came from.
_ORIGIN = frozenset({"name_or_path", "_name_or_path", "_commit_hash", "transformers_version"})
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
}
_OF_FSDP = ("_fsdp", "_is_fsdp", "__composable_api_state_key")
_VALUES = (*_PLAIN, Tensor, np.ndarray, Mapping, list, tuple, set, frozenset, FunctionType, MethodType)
_SUM_WIDTH = 1024


def identity_of(
    model: nn.Module, functions: Mapping[str, Any], name: str | None, strict: bool
) -> dict[str, Any]:
    """Describe a model, functions with all that they read, and the settings of torch that numbers depend on.

    Collective if the model is sharded; the same however it is. Every weight is read, on its device. What the
    model's `forward` assigns, such as counters, does not count, nor do objects in attributes whose name
    begins with `_`: both are state of running, such as caches. What cannot be described, such as an open
    file, is refused if `strict`, unless `name` stands for it; InterpError says where it is.
    """
    describe = Describer({id(module): name for name, module in _modules(model)})
    found = {
        "model": model_identity(model, describe),
        **{key: describe.name(value, key) for key, value in functions.items()},
        "numerics": _numerics(),
        "identity": name,
    }
    if describe.unknown and name is None and strict:
        raise InterpError(
            f"{', '.join(describe.unknown[:4])} cannot be compared with that of another call; expected what "
            "can be pickled: give identity=, a name to be changed along with it, or resume=False"
        )
    return found


def model_identity(model: nn.Module, describe: Describer | None = None) -> dict[str, Any]:
    """Classes, code, settings, weights, buffers and active hooks of a model. Collective if it is sharded."""
    for module in filter(is_unit, model.modules()):
        module.reshard()  # type: ignore[operator]  # what a forward pass left gathered may be cast
    modules = dict(_modules(model))
    describe = describe or Describer({id(module): name for name, module in modules.items()})
    known: dict[Tensor, bytes] = {}  # of weights that modules share
    layout, code, settings, weights, buffers, hooks = ([] for _ in range(6))
    count = 0
    for name, module in modules.items():
        kind = type(module).__bases__[1] if is_unit(module) else type(module)  # FSDP2 puts one in front
        layout.append([name, kind.__qualname__, re.sub(r" at 0x[0-9a-f]+", "", module.extra_repr())])
        code.append(describe(kind, f"{name} {kind.__qualname__}"))
        settings += [f"{name}.{key} {describe(v, f'{name}.{key}')}" for key, v in _settings(module, kind)]
        hooks += [f"{name} {describe(hook, f'a hook of {name!r}')}" for hook in _hooks(module)]
        for key, tensor in sorted(module._buffers.items()):
            if tensor is not None and key in module._non_persistent_buffers_set:
                buffers.append(f"{name}.{key} {describe(tensor, f'{name}.{key}')}")
        for key, tensor in _saved(module):
            layout.append([name, key, list(tensor.shape), tensor.dtype])
            if tensor.is_meta:
                describe.unknown.append(f"{name}.{key} (offloaded: on the meta device)")
            known[tensor] = known[tensor] if tensor in known else _checksum(tensor)
            weights.append(known[tensor])
            count += tensor.numel()
    texts = {"layout": layout, "code": code, "settings": settings, "buffers": buffers, "hooks": hooks}
    found = {key: _crc(repr(value).encode()) for key, value in texts.items()}
    return found | {"numbers": count, "class": layout[0][1], "weights": _crc(b"".join(weights))}


def is_distributed(model: nn.Module) -> bool:
    """Whether this process holds only a part of the model, so that it must run together with others."""
    return any(is_dtensor(parameter) for parameter in model.parameters())


class Describer:
    """Gives texts that are the same in every process for equal values; modules are described by their names.

    Attributes:
        unknown: where something was that cannot be described, and what.
    """

    def __init__(self, modules: Mapping[int, str]) -> None:
        self.unknown: list[str] = []
        self._modules = modules
        self._known: dict[tuple[int, bool], tuple[Any, str]] = {}  # with the value: no other takes its id
        self._is_in_class = False

    def name(self, value: Any, place: str) -> Any:
        """The description of a function with its name in front, or of functions; texts and None stay."""
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, Mapping):
            return {key: self.name(function, f"{place} of {key}") for key, function in value.items()}
        inner = value.func if isinstance(value, functools.partial) else value
        return f"{getattr(inner, '__qualname__', type(inner).__qualname__)}:{self(value, place)}"

    def __call__(self, value: Any, place: str) -> str:
        """Describe a value that is at `place`, for messages."""
        if isinstance(value, _PLAIN):
            return repr(value)
        key = id(value), self._is_in_class
        if key not in self._known:
            self._known[key] = value, "itself"  # while its parts are looked at
            texts = [self(part, place) for part in self._parts(value, place)]
            text = f"{type(value).__qualname__}({','.join(texts)})"
            self._known[key] = value, text if len(text) < 20 else _crc(text.encode())
        return self._known[key][1]

    def _parts(self, value: Any, place: str) -> Iterable[Any]:
        """What a value consists of."""
        if id(value) in self._modules:
            return ["module", self._modules[id(value)]]
        if isinstance(value, Tensor | np.ndarray | np.generic | CodeType | nn.Module | ModuleType):
            return _parts_of_known(value)
        if isinstance(value, type):
            return self._parts_of_class(value)
        if isinstance(value, FunctionType):
            return self._parts_of_function(value)
        if isinstance(value, Mapping):
            return [x for key in sorted(value, key=repr) if key not in _ORIGIN for x in (key, value[key])]
        if isinstance(value, list | tuple | set | frozenset):
            return value if isinstance(value, list | tuple) else sorted(self(item, place) for item in value)
        for kind, names in _ATTRIBUTES.items():
            if isinstance(value, kind):
                return [getattr(value, name) for name in names]
        return [value()] if isinstance(value, weakref.ref) else self._pickled(value, place)

    def _parts_of_class(self, kind: type) -> list[Any]:
        """Of each class of ours among its bases all functions; what they read elsewhere if it is fixed."""
        found: list[Any] = [kind.__module__, kind.__qualname__]
        before, self._is_in_class = self._is_in_class, True
        for base in kind.__mro__:
            functions = [
                (key, self(value, f"{kind.__qualname__}.{key}"))
                for key, value in sorted(vars(base).items())
                if isinstance(value, FunctionType | staticmethod | classmethod | property)
                and not _is_of_library(getattr(value, "fget", None) or value)
            ]
            found += functions and [base.__qualname__, functions]
        self._is_in_class = before
        return found

    def _parts_of_function(self, function: FunctionType) -> list[Any]:
        closed = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        given = [function.__defaults__, function.__kwdefaults__, closed]
        if _is_of_library(function):
            return [function.__module__, function.__qualname__, *given]
        return [function.__qualname__, function.__code__, *given, self._globals(function)]

    def _globals(self, function: FunctionType) -> dict[str, Any]:
        """What a function reads of its module; of a class and of a model only what is fixed there."""
        found: dict[str, Any] = {}
        for name in _global_names(function.__code__) & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, ModuleType) and not _is_library(getattr(value, "__file__", None)):
                held = vars(value)
                found |= {f"{name}.{key}": held[key] for key in _names(function.__code__) & held.keys()}
            else:
                found[name] = value
        return {key: value for key, value in found.items() if not self._is_in_class or _is_fixed(value)}

    def _pickled(self, value: Any, place: str) -> Iterable[Any]:
        module = type(value).__module__
        if module.startswith(("torch.distributed", "torch._C._distributed")):
            return []  # how it is spread, not what it computes
        if isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType | None):
            return [value.__module__, value.__qualname__]
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception:  # whatever an object says that cannot be pickled
            self.unknown.append(f"{place} (a {type(value).__qualname__})")
            return ["unknown"]
        if isinstance(reduced, str):
            return [module, reduced]
        return [list(part) if isinstance(part, Iterator) else part for part in reduced]


def _parts_of_known(value: Any) -> Iterable[Any]:
    if isinstance(value, Tensor):
        whole = _whole(value)
        data = whole if whole.is_sparse or whole.is_meta else _crc(as_bytes(whole))
        return [list(value.shape), value.dtype, str(data)]
    if isinstance(value, np.ndarray | np.generic):
        items = list(np.ravel(value)) if value.dtype.hasobject else _crc(value.tobytes())
        return [list(value.shape), str(value.dtype), items]
    if isinstance(value, CodeType):
        return [value.co_code, value.co_names, value.co_consts]
    return [value.__name__] if isinstance(value, ModuleType) else [model_identity(value)]


def _numerics() -> dict[str, Any]:
    """Settings of torch that change numbers."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return {
        "autocast": {kind: str(torch.get_autocast_dtype(kind)) for kind in kinds},
        "default_dtype": str(torch.get_default_dtype()),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def _settings(module: nn.Module, kind: type) -> list[tuple[str, Any]]:
    """Attributes, but for those that a forward pass sets, marks of FSDP2, and private objects (caches)."""
    names = vars(module).keys() - _OF_EVERY_MODULE - _assigned_by_forward(kind)
    held = [(name, vars(module)[name]) for name in sorted(names) if not name.startswith(_OF_FSDP)]
    return [
        (name, value)
        for name, value in held
        if not _is_ours(value) and (not name.startswith("_") or isinstance(value, _VALUES))
    ]


@functools.cache
def _assigned_by_forward(kind: type) -> frozenset[str]:
    """Attributes that `forward`, or a method that it names, assigns: state such as counters and caches."""
    found: set[str] = set()
    done: set[str] = set()
    todo = ["forward"]
    while todo:
        name = todo.pop()
        method: Any = getattr(kind, name, None)
        code = getattr(inspect.unwrap(method), "__code__", None)
        if code is not None and name not in done:
            found |= {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
            todo += code.co_names
        done.add(name)
    return frozenset(found)


def _hooks(module: nn.Module) -> Iterator[Any]:
    """What changes values on their way: `edit` by site and function, and hooks of others than torch."""
    for hook in [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]:
        edits = getattr(getattr(hook, "__self__", None), "edits", None)
        if edits is not None:
            yield from [(str(site), function) for site, function in edits]
        elif not _is_ours(hook) and not (getattr(hook, "__module__", "") or "").startswith("torch."):
            yield hook


def _is_ours(value: Any) -> bool:
    """Whether it belongs to a capture or an edit, which `_hooks` tells of."""
    owner = getattr(value, "__self__", value)
    return type(owner).__module__.startswith("forge_interp.hooks.")


def _global_names(code: CodeType) -> set[str]:
    """What a function, and those inside it, read as globals."""
    found = {
        step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return found.union(*(_global_names(c) for c in code.co_consts if isinstance(c, CodeType)))


def _names(code: CodeType) -> set[str]:
    """Names of globals and attributes in a function and those inside it."""
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))


def _is_fixed(value: Any) -> bool:
    """Whether a global is a number, a text or a function, and no object that may be changing."""
    if isinstance(value, tuple | frozenset):
        return all(map(_is_fixed, value))
    return isinstance(value, (*_PLAIN, FunctionType))


def _is_of_library(function: Any) -> bool:
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return code is None or _is_library(code.co_filename)


def _is_library(file: str | None) -> bool:
    """Whether a file belongs to Python or to an installed package, whose version stands for it."""
    if file is None or file.startswith("<frozen"):
        return True
    return file.startswith(_LIBRARIES) or any(part in file for part in _LIBRARY_FOLDERS)


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


def _saved(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and the buffers that are saved."""
    saved = sorted(module._buffers.keys() - module._non_persistent_buffers_set)
    for key, tensor in [*module._parameters.items(), *((key, module._buffers[key]) for key in saved)]:
        if tensor is not None:
            yield key, tensor


def _checksum(tensor: Tensor) -> bytes:
    """Sums of all bits as integers, by rows and by columns of 1024, so that their order counts."""
    whole = _whole(tensor)
    if whole.is_meta or not whole.numel():
        return b""
    raw = whole.flatten().view(torch.uint8)
    square = 8 * _SUM_WIDTH * (len(raw) // (8 * _SUM_WIDTH))
    table, rest = raw[:square], raw[square:]
    table = table.clone() if table.storage_offset() % 8 else table
    words = table.view(torch.int64).view(-1, _SUM_WIDTH)
    return b"".join(bytes(as_bytes(part)) for part in (words.sum(0), words.sum(1), rest))


def _whole(tensor: Tensor) -> Tensor:
    whole = tensor.detach()
    if is_dtensor(whole):
        whole = whole.to(whole.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return whole


def _crc(data: Any) -> str:
    return f"{zlib.crc32(data):08x}"
