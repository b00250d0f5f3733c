"""How do weights on disk come into a model that exists?

Reads safetensors, in one file or several with an index, as `forge export` and Hugging Face write them.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from forge_interp.errors import InterpError
from forge_interp.hooks.sites import without_wrappers

Rename = Mapping[str, str | None] | Callable[[str], str | None]

_INDEX = ".safetensors.index.json"
_LISTED = 20
"""Missing and unexpected tensors that an error names; near misses are looked for among 20 times as many."""
_USUAL = ("model.safetensors", f"model{_INDEX}")
_FLOAT, _COMPLEX, _INTEGER, _BOOL = "floating point", "complex", "integer", "boolean"
_KINDS = {"F": _FLOAT, "B": _FLOAT, "C": _COMPLEX, "I": _INTEGER, "U": _INTEGER, "BOOL": _BOOL}


def load_weights(
    model: nn.Module,
    path: Path | str,
    *,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Copy weights from safetensors into a model, one tensor at a time.

    Strict: every parameter and persistent buffer must be there with its shape, and nothing else; of tensors
    that the model shares under several names, one name is enough. Of a model sharded into DTensors (FSDP2,
    tensor parallel) each rank fills its part.

    Args:
        model: with memory (not on the meta device); wrappers of compile and checkpoint do not count in names.
        path: a `.safetensors` file, an index (`*.safetensors.index.json`), or a folder that holds either.
        rename: the name in the model of each name in the file: a function, or a mapping of prefixes of which
            the longest that fits is replaced, e.g. {"model.": "", "lm_head.": None}; None leaves tensors out.
        dtype: the loaded floating-point parameters and buffers take this dtype; by default they keep theirs,
            and what is read is converted.

    Returns:
        The same model, in the mode (train or eval) it was in.

    Raises:
        InterpError: there are no such files, one is damaged, or tensors are missing, left over or of another
            shape or kind; lists them with near misses. The model is unchanged then.
    """
    path = Path(path).expanduser()
    given, problems = _renamed(_entries(_files(path)), rename)
    wanted = _targets(model, dtype)
    problems += _mismatches(given, wanted)
    if problems:
        hint = _prefix_hint(given.keys(), wanted.keys())
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise InterpError(f"{path} does not hold the weights of this {type(model).__name__}:\n{listed}{hint}")
    with torch.no_grad():
        if dtype is not None:
            for tensor in {id(wanted[name]): wanted[name] for name in given}.values():
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(dtype)
        for name, tensor in _read(given):
            _copy(wanted[name], tensor)
    return model


@dataclass(frozen=True)
class _Entry:
    """A tensor of a file: where it is, under which name, and what its header says."""

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: str

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}"


def _files(path: Path) -> list[Path]:
    """The files that a path stands for."""
    if path.is_dir():
        path = _entrance(path)
    if not path.exists():
        raise InterpError(f"there is no {path}; expected a .safetensors file, or a folder of them")
    if not path.name.endswith(_INDEX):
        return [path]
    try:
        names = json.loads(path.read_text())["weight_map"].values()
        files = [path.with_name(name) for name in sorted(set(names))]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise InterpError(f"{path} is no index; expected JSON with 'weight_map': {{name: file}}") from None
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise InterpError(f"{path} names {', '.join(absent)}, which are not beside it; fetch them")
    return files


def _entrance(folder: Path) -> Path:
    """The one file, or the one index, of a folder; `model.*` if there are others beside it."""
    files, indices = sorted(folder.glob("*.safetensors")), sorted(folder.glob(f"*{_INDEX}"))
    for found in ([p for p in [*files, *indices] if p.name in _USUAL], indices, files):
        if len(found) == 1:
            return found[0]
        if found:
            break
    held = ", ".join(path.name for path in [*files, *indices]) or "no *.safetensors"
    raise InterpError(f"{folder} holds {held}; expected one file or one index: give the one you mean")


def _entries(files: Iterable[Path]) -> list[_Entry]:
    """What all files hold, from their headers."""
    found = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (no mapping)
                    header = opened.get_slice(name)
                    dtype: str = header.get_dtype()
                    kind = _KINDS.get(dtype) or _KINDS.get(dtype[0], dtype)
                    found.append(_Entry(file, name, tuple(header.get_shape()), kind))
        except SafetensorError as error:
            raise InterpError(f"{file} cannot be read as safetensors ({error}); write it again") from None
    return found


def _renamed(entries: list[_Entry], rename: Rename | None) -> tuple[dict[str, _Entry], list[str]]:
    """Entries by the name they have in the model, and those that claim the same one."""
    found: dict[str, _Entry] = {}
    problems = []
    for entry in entries:
        name = _new_name(entry.name, rename)
        if name is None:
            continue
        if name in found:
            problems.append(f"twice: {found[name].name} and {entry.name} would both be {name}")
        found[name] = entry
    return found, problems


def _new_name(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    if not isinstance(rename, Mapping):
        return rename(name)
    prefix = max((p for p in rename if name.startswith(p)), key=len, default=None)
    if prefix is None:
        return name
    start = rename[prefix]
    return None if start is None else start + name[len(prefix) :]


def _targets(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The parameters and persistent buffers themselves, by name without wrappers."""
    if dtype is not None and not dtype.is_floating_point:
        raise InterpError(f"dtype is {dtype}; expected a floating-point one, such as torch.bfloat16")
    held = model.state_dict(keep_vars=True)
    tensors = {without_wrappers(name): t for name, t in held.items() if isinstance(t, Tensor)}
    empty = [name for name, tensor in tensors.items() if is_lazy(tensor) or tensor.is_meta]
    if empty:
        raise InterpError(
            f"{len(empty)} tensors of the model have no memory, such as {empty[0]}; build it outside of "
            "torch.device('meta'), and run lazy modules once"
        )
    if dtype is not None and any(hasattr(tensor, "full_tensor") for tensor in tensors.values()):
        raise InterpError(
            f"dtype={dtype} cannot change a sharded model; call model.to(dtype) before sharding"
        )
    return tensors


def _mismatches(given: Mapping[str, _Entry], wanted: Mapping[str, Tensor]) -> list[str]:
    """Everything that stands between the files and the model."""
    names_of: dict[int, list[str]] = defaultdict(list)
    for name, tensor in wanted.items():
        names_of[id(tensor)].append(name)
    missing = [names[0] for names in names_of.values() if not any(name in given for name in names)]
    left_over = [name for name in given if name not in wanted]
    problems = [
        *(
            f"missing: {name} {list(wanted[name].shape)}{_near(name, left_over)}"
            for name in missing[:_LISTED]
        ),
        *_more("missing", missing),
        *(f"unexpected: {_origin(name, given[name])}{_near(name, missing)}" for name in left_over[:_LISTED]),
        *_more("unexpected", left_over),
    ]
    for name, entry in given.items():
        if name not in wanted:
            continue
        shape, kind = tuple(wanted[name].shape), _kind(wanted[name])
        if entry.shape != shape:
            problems.append(f"shape: {name} is {list(entry.shape)} in the file, {list(shape)} in the model")
        elif entry.kind != kind:
            problems.append(f"dtype: {name} is {entry.kind} in the file, {kind} in the model")
    shared = [[name for name in names if name in given] for names in names_of.values()]
    return problems + _contradictions([given[name] for name in names] for names in shared if len(names) > 1)


def _contradictions(groups: Iterable[list[_Entry]]) -> list[str]:
    """Tensors that are one in the model, but not the same in the files."""
    problems = []
    for first, *others in groups:
        for other in others:
            (_, a), (_, b) = _read({"a": first, "b": other})
            if not torch.equal(a, b):
                both = f"{first.name} and {other.name}"
                problems.append(f"shared: {both} are one in the model and differ in the file")
    return problems


def _kind(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool:
        return _BOOL
    if tensor.is_complex():
        return _COMPLEX
    return _FLOAT if tensor.is_floating_point() else _INTEGER


def _more(kind: str, names: list[str]) -> list[str]:
    return [f"{kind}: {len(names) - _LISTED} more"] if len(names) > _LISTED else []


def _origin(name: str, entry: _Entry) -> str:
    return str(entry) if name == entry.name else f"{entry} (renamed to {name})"


def _near(name: str, others: list[str]) -> str:
    near = get_close_matches(name, others, n=1, cutoff=0.8) if len(others) <= 20 * _LISTED else []
    return f"; near {near[0]}" if near else ""


def _prefix_hint(given: Iterable[str], wanted: Iterable[str]) -> str:
    """A sentence when the names would fit without, or with, one prefix."""
    given, wanted = set(given), set(wanted)
    votes: Counter[tuple[str, str]] = Counter()
    for name in given - wanted:
        rest = name.partition(".")[2]
        if rest in wanted:
            votes[name[: -len(rest)], ""] += 1
    for name in wanted - given:
        rest = name.partition(".")[2]
        if rest in given:
            votes["", name[: -len(rest)]] += 1
    if not votes:
        return ""
    (old, new), count = votes.most_common(1)[0]
    return f"\n{count} names fit with rename={{{old!r}: {new!r}}}"


def _read(entries: Mapping[str, _Entry]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor when it is its turn, file after file."""
    by_file: dict[Path, list[str]] = defaultdict(list)
    for name, entry in entries.items():
        by_file[entry.file].append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as opened:
            for name in names:
                yield name, opened.get_tensor(entries[name].name)


def _copy(target: Tensor, source: Tensor) -> None:
    if not hasattr(target, "full_tensor"):
        target.copy_(source)
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(target, DTensor)
    here = source.to(target.device)
    # every rank has read the tensor, so it cuts out its own part
    target.copy_(distribute_tensor(here, target.device_mesh, target.placements, src_data_rank=None))
