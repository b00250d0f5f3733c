"""Simulates the ranks of a job in one process: a process group that communicates nothing."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from forge_model.moe import experts
from forge_parallel import capabilities, dispatch
from forge_parallel import tensor as shards
from forge_parallel.env import Env
from forge_parallel.error import ParallelError
from forge_parallel.mesh import Mesh
from forge_vlm.fusion import moma
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import _sharding_prop

from forge_trainer.optim import gather_matrices
from forge_trainer.steps.sums import Sums

CPU = torch.device("cpu")


@contextmanager
def group_of(ranks: int, rank: int, needed: bool) -> Iterator[Env]:
    """Make a fake default process group, seen from one rank; remove it at the end.

    Args:
        ranks: number of ranks of the job.
        rank: the traced rank.
        needed: whether even one rank has a group; see `forge_parallel.env.process_group`.

    Raises:
        ParallelError: this process has a process group already.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ParallelError(
            "this process trains, or has another process group; plan a job in a process of its own"
        )
    env = Env(rank, 0, ranks, CPU, "none")
    if ranks == 1 and not needed:
        yield env
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with patch.object(capabilities, "host_group", lambda: dist.group.WORLD):
            yield env
    finally:
        dist.destroy_process_group()
        shards._ranks.cache_clear()  # it keeps device meshes of groups that are gone


@contextmanager
def nothing_changed() -> Iterator[None]:
    """Restore random states and silence torch's warnings, which a real run shows."""
    python, legacy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([]), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


@contextmanager
def fake_tensors(skew: float = 1.0) -> Iterator[FakeTensorMode]:
    """Enter a mode of fake tensors; replace code that needs their values or answers of other ranks.

    Args:
        skew: rows that the experts of the traced rank serve, in multiples of even routing.
    """
    routing = _EvenRouting(skew)
    with ExitStack() as stack:
        for place, name, change in [
            (shards, "_ranks", _on_real_tensors(shards._ranks)),
            (dispatch, "numbers_of", routing.numbers),
            (dispatch.AllToAll, "__call__", routing.noting(dispatch.AllToAll.__call__)),
            (experts.Experts, "forward", routing.telling(experts.Experts.forward)),
            (moma.ModalityExperts, "forward", routing.of_a_modality(moma.ModalityExperts.forward)),
            (
                gather_matrices.MatrixExchange,
                "__init__",
                _holdings_told(gather_matrices.MatrixExchange.__init__),
            ),
            (Sums, "names", _own_names),
            (FakeTensor, "data_ptr", _place_in_memory),
            # DTensor tries operations with tensors of full size first: they must not be taken for ours
            (_sharding_prop, "detect_fake_mode", lambda *_: None),
        ]:
            stack.enter_context(patch.object(place, name, change, create=True))
        yield stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))


def _place_in_memory(tensor: Tensor) -> int:
    """Return a number that is equal for fake tensors that would begin at the same address."""
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()


def _own_names(sums: Sums, _: Any) -> dict[str, torch.dtype]:
    """Replace `Sums.names`, which communicates with all ranks."""
    return {name: pair.dtype for name, pair in sums._pairs.items()}


def _holdings_told(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of an exchange: compute the holdings of other ranks from the layout."""

    def run(self: Any, parameters: Sequence[Tensor], mesh: Mesh, *rest: Any) -> None:
        def everyone(mine: Any, view: Any) -> Any:
            return [mine] if view.size == 1 else _all_holdings(parameters, view)

        with patch.object(gather_matrices, "_everyone", everyone):
            init(self, parameters, mesh, *rest)

    return run


def _all_holdings(parameters: Sequence[Any], view: Any) -> list[list[Any]]:
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(view.group)
    return [[_holding(parameter, rank, rank == ranks[0]) for parameter in parameters] for rank in ranks]


def _holding(parameter: Any, rank: int, first: bool) -> Any:
    """Return the box of a parameter on a rank."""
    if not shards.is_dtensor(parameter):
        shape = tuple(parameter.shape)
        return gather_matrices.Holding(gather_matrices.Box((0,) * len(shape), shape), first)
    grid = parameter.device_mesh
    with unset_fake_temporarily():
        coordinate = tuple((grid.mesh == rank).nonzero()[0].tolist())
    box = shards._box(tuple(grid.shape), coordinate, tuple(parameter.placements), tuple(parameter.shape))
    return gather_matrices.Holding(gather_matrices.Box(box.offsets, box.extents), box.is_first)


def _on_real_tensors(read: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that reads the tensor of a device mesh, which is a real tensor."""

    def run(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return read(*arguments)

    return run


class _EvenRouting:
    """Even routing: every expert serves equally many rows, on the traced rank `skew` times as many."""

    def __init__(self, skew: float) -> None:
        self._skew, self._rows, self._share = skew, 0, 1.0

    def noting(self, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap a dispatcher to record the number of its rows first."""

        def run(dispatcher: Any, experts: Any, rows: Tensor, ends: Tensor, meanwhile: Any = None) -> Tensor:
            self._rows = len(rows)
            return call(dispatcher, experts, rows, ends, meanwhile)

        return run

    def numbers(self, tensor: Tensor) -> Any:
        """Replace `numbers_of`: return the rows sent, then the rows received."""
        sent, *others = (_even(self._rows, tuple(one.shape)) for one in tensor)
        return [sent, *(_scaled(one, self._skew) for one in others)]

    def of_a_modality(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap experts of one modality, which has half of the tokens; see `forge_trainer.plan.images`."""

        def run(*arguments: Any) -> Tensor:
            self._share = 0.5
            try:
                return forward(*arguments)
            finally:
                self._share = 1.0

        return run

    def telling(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap experts so that their ends can be read on the host, as CPU products do."""

        def run(served: Any, rows: Tensor, ends: Tensor) -> Tensor:
            each = _even(round(self._share * len(rows)), tuple(ends.shape))
            ends.tolist = lambda: np.cumsum(each).tolist()  # type: ignore[method-assign]
            return forward(served, rows, ends)

        return run


def _even(rows: int, shape: tuple[int, ...]) -> Any:
    """Return nested lists of a shape that add up to `rows`."""
    count = int(np.prod(shape))
    each, rest = divmod(rows, count)
    flat = np.full(count, each, dtype=np.int64)
    flat[:rest] += 1
    return flat.reshape(shape).tolist()


def _scaled(numbers: Any, factor: float) -> Any:
    return [_scaled(one, factor) for one in numbers] if isinstance(numbers, list) else int(numbers * factor)
