"""Sets the initial weights of a run: random values, or tensors of a checkpoint or Hugging Face folder."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from forge_ckpt.error import CheckpointError
from forge_ckpt.inspect.checkpointed import Checkpointed
from forge_ckpt.interop.weights import Weights
from forge_ckpt.state import MODEL, model_tensors
from forge_model.config import DecoderConfig, ModelConfig
from forge_model.hf.config import config_from_hf
from forge_model.init import initialize
from forge_parallel.env import Env
from forge_parallel.tensor import local_shard
from torch import Tensor, nn

from forge_trainer.checkpoints.init_from import (
    Origin,
    choose,
    form_of,
    is_of_the_whole,
    part_of,
    require_origins,
    unlike,
)
from forge_trainer.config.job import Job
from forge_trainer.console import emit

Shape = tuple[int, ...]

Read = Callable[[Shape, Shape], Tensor]
"""A function that returns the values of a box of a tensor, from its start and its extents."""


def set_initial_weights(parts: Sequence[nn.Module], job: Job) -> None:
    """Initialize every parameter, from the seed or from `train.init_from`.

    Args:
        parts: this rank's parts of the model; each loads the tensors of its names.
        job: configuration of the run.

    Raises:
        CheckpointError: a tensor does not fit, is damaged or missing, or a pattern names nothing.
        ConfigError, ModelError: the weights belong to another model; lists every difference.
    """
    origins = require_origins(job.model, job.train)
    ours = _shapes(job.model) if origins else {}
    tensors = {name: tensor for origin in origins for name, tensor in _tensors_of(origin, job, ours)}
    theirs = {name: tensor.shape for name, tensor in tensors.items()}
    in_parts = any(one.prefix and not is_of_the_whole(job.model, one) for one in origins)
    new = {name for name in ours if in_parts and job.model.seed_of(name) is None}
    chosen = choose(ours, theirs, job.train, new) if origins else None
    for part in parts:
        initialize(part, job.job.seed, local_shard)
        own = dict([*part.named_parameters(remove_duplicate=False), *part.named_buffers()])
        for name in (*chosen.taken, *chosen.resized) if chosen is not None else ():
            if name in own:
                dtype, shape, read = _source(tensors[name])
                require_numbers(name, dtype, own[name], tensors[name].origin)
                copy_common(shape, read, own[name])
    if Env.detect().rank == 0 and chosen is not None:
        named = " and ".join(job.train.origins.values())
        lines = [*chosen.lines(ours, theirs, named, job.job.seed)]
        for origin in origins if job.train.init_in_parts else ():
            of_whole = is_of_the_whole(job.model, origin)
            mine = job.model if of_whole else part_of(job.model, origin.prefix)
            differs = unlike(mine, origin.model())
            lines += [f"  differs    {line}" for line in differs]
        emit("".join(f"{line}\n" for line in lines), sys.stdout)


class _Stored(NamedTuple):
    """A tensor of an origin.

    Attributes:
        tensors: all tensors of the origin.
        name: name of this tensor in `tensors`.
        shape: shape of the tensor, or of the stack of copies that the model needs, [copies, ...].
        origin: name of the origin in the configuration.
    """

    tensors: Mapping[str, Tensor]
    name: str
    shape: Shape
    origin: str


def _tensors_of(origin: Origin, job: Job, ours: Mapping[str, Shape]) -> Iterator[tuple[str, _Stored]]:
    """Yield the tensors of an origin under their names in the model, whose tensors are `ours`.

    One tensor may serve several of the model, which then start equal, or all experts of a stacked tensor.
    """
    if origin.is_ours:
        folder = origin.folder
        tensors: Mapping[str, Tensor] = (
            Checkpointed(folder, MODEL) if origin.is_checkpoint else Weights(folder)
        )
        shapes = _shapes_there(tensors)
        if is_of_the_whole(job.model, origin):
            inside = {name for name in shapes if name.startswith(f"{origin.prefix}.")}
            yield from ((name, _Stored(tensors, name, shapes[name], origin.name)) for name in inside)
            return
    else:
        model = part_of(job.model, origin.prefix)
        weights = Weights(origin.folder)
        if job.train.init_in_parts and isinstance(model, DecoderConfig):
            model = config_from_hf(weights.config())
        form = form_of(model, origin.name)
        if not job.train.init_in_parts:
            form.require(weights.config(), origin.name)
        tensors, shapes = form.ours(weights), _shapes(model)
    seed_names = {f"{origin.prefix}.{name}".lstrip("."): name for name in shapes}
    seeds = {name: job.model.seed_of(name) for name in ours} if origin.prefix else {}
    started = {name: seed for name, seed in seeds.items() if seed is not None and seed in seed_names}
    unused = {name: name for name in seed_names.keys() - {*started.values()}}
    for name, seed in (unused | started).items():
        inner = seed_names[seed]
        shape = tuple(shapes[inner])
        stacked = seed != name and ours[name][1:] == shape
        yield name, _Stored(tensors, inner, ours[name] if stacked else shape, origin.name)


def _shapes_there(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    if isinstance(tensors, Checkpointed):
        return {name: tuple(tensors.entry(name).shape) for name in tensors}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def require_numbers(name: str, dtype: torch.dtype, target: Tensor, origin: str) -> None:
    """Check that a tensor to load is not quantized: its values mean nothing without its scales.

    Raises:
        CheckpointError: the tensor is quantized.
    """
    if dtype != target.dtype and not (dtype.is_floating_point and dtype.itemsize > 1):
        raise CheckpointError(
            f"{name} of {origin} is {str(dtype).removeprefix('torch.')}; expected "
            "float16, bfloat16, float32 or float64: take weights that are not quantized"
        )


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of a model; shared tensors occur once."""
    with torch.device("meta"):
        tensors = model_tensors(config.build())
    return {name.removeprefix(MODEL): tuple(tensor.shape) for name, tensor in tensors.items()}


def _source(stored: _Stored) -> tuple[torch.dtype, Shape, Read]:
    """Return dtype, shape and box reader of a tensor; a checkpoint is read only as far as needed."""
    if isinstance(stored.tensors, Checkpointed):
        entry = stored.tensors.entry(stored.name)
        dtype, shape = getattr(torch, entry.dtype), entry.shape
        read: Read = partial(stored.tensors.part, stored.name)
    else:
        tensor = stored.tensors[stored.name]
        dtype, shape, read = tensor.dtype, tuple(tensor.shape), partial(_box, tensor)
    return dtype, stored.shape, read if len(shape) == len(stored.shape) else partial(_copies, read)


def _box(tensor: Tensor, start: Shape, size: Shape) -> Tensor:
    """See `Read`."""
    return tensor[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]


def _copies(read: Read, start: Shape, size: Shape) -> Tensor:
    """See `Read`; for copies of a tensor along the first dim."""
    return read(start[1:], size[1:]).expand(size)


@torch.no_grad()
def copy_common(shape: Shape, read: Read, target: Tensor) -> None:
    """Copy the common part of two tensors, from the first index of each dim on.

    Args:
        shape: full shape of the source.
        read: reads a box of the source.
        target: tensor with the same number of dims, sharded or not. This rank fills its shard.
    """
    values, offsets, _ = local_shard(target)
    ends = [min(o + n, length) for o, n, length in zip(offsets, values.shape, shape, strict=True)]
    size = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
    if min(size, default=1) > 0:
        values[tuple(map(slice, size))].copy_(read(offsets, size))
