"""Attention by messages between ranks against attention of one process, and what travels against theory."""

from typing import NamedTuple

import pytest
import torch
from forge_model import DecoderConfig
from forge_model.attention.explicit import explicit_attention, sink_attention
from forge_model.attention.mask import Mask, softmax_attention
from forge_model.config import GroupedQueryConfig
from forge_parallel import Env, MeshConfig, ParallelConfig, Plan, build_mesh, parallelize
from forge_parallel.compile_config import CompileConfig
from forge_parallel.config import ContextParallelConfig
from forge_parallel.context_parallel import Cut, Ring
from forge_parallel.error import ParallelError
from forge_parallel.testing import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, HEADS, HEAD_DIM, WIDTH = 2, 4, 8, 6
"""WIDTH tokens of each of the two pieces of a rank."""


class Case(NamedTuple):
    window: int | None
    documents: bool
    kv_heads: int
    value_dim: int
    dtype: str = "float64"
    sinks: bool = False


CASES = {
    "causal": Case(None, False, 4, 8),
    "documents": Case(None, True, 2, 8),
    "window": Case(7, False, 1, 8),
    "window of one": Case(1, False, 4, 8),
    "window of all but one": Case(2 * 2 * WIDTH - 1, False, 4, 8),
    "documents in a window": Case(4, True, 2, 5),
    "wide values": Case(None, True, 2, 12),
    "bfloat16": Case(None, True, 2, 8, "bfloat16"),
    "sinks": Case(None, False, 2, 8, sinks=True),
    "sinks with documents in a window": Case(4, True, 2, 12, sinks=True),
}


class Sent(TorchDispatchMode):
    """Adds up the bytes of messages that this rank sends and receives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"send": 0, "recv": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        for kind in self.bytes:
            if name.startswith("c10d::") and kind in name:
                self.bytes[kind] += sum(x.numel() * x.element_size() for x in args[0])
        return func(*args, **kwargs or {})


def attended(*given: object) -> tuple[list[float], dict, dict]:
    """How far results and gradients are from those of one process, relatively; bytes there and back."""
    case = Case(*given)
    mesh = build_mesh(MeshConfig(cp=torch.distributed.get_world_size()), Env.detect())
    cut, dtype = Cut(mesh.context, 2), getattr(torch, case.dtype)
    tokens, generator = 2 * mesh.context.size * WIDTH, torch.Generator().manual_seed(1)

    def drawn(heads: int, width: int) -> torch.Tensor:
        made = torch.randn(BATCH, heads, tokens, width, generator=generator, dtype=torch.float64)
        return made.to(dtype).requires_grad_()

    whole = [drawn(HEADS, HEAD_DIM), drawn(case.kv_heads, HEAD_DIM), drawn(case.kv_heads, case.value_dim)]
    through = drawn(HEADS, case.value_dim).detach()
    ids = (torch.rand(BATCH, tokens, generator=generator) < 0.1).cumsum(1) if case.documents else None
    mask = Mask(tokens, mesh.device, ids)
    attend = sink_attention if case.sinks else softmax_attention
    sinks = {"sinks": drawn(HEADS, 1)[0, :, 0, 0].detach().requires_grad_()} if case.sinks else {}
    out = attend(*whole, attend.resolve(mask, case.window), 0.3, **sinks)
    expected = [out, *torch.autograd.grad(out, [*whole, *sinks.values()], through)]

    index, ring = cut.index(tokens, mesh.context.rank, mesh.device), Ring(attend, cut)
    mine = [x.detach()[:, :, index].requires_grad_() for x in whole]
    described = Mask(len(index), mesh.device, None if ids is None else ids[:, index])
    resolved = ring.resolve(described, case.window)
    with Sent() as there:
        out = ring(*mine, resolved, 0.3, **sinks)
    with Sent() as back:
        found = [out, *torch.autograd.grad(out, [*mine, *sinks.values()], through[:, :, index])]
    if case.sinks:  # which all ranks hold, and each has a part of the gradient
        of_sinks = expected.pop()
        torch.distributed.all_reduce(summed := found.pop())
    far = [
        ((a - b[:, :, index]).abs().max() / b.abs().max()).item()
        for a, b in zip(found, expected, strict=True)
    ]
    if case.sinks:
        far.append(((summed - of_sinks).abs().max() / of_sinks.abs().max()).item())
    return far, there.bytes, back.bytes


def travels(case: Case, rank: int, ranks: int, tokens: int = WIDTH) -> int:
    """Pieces of others that a rank receives: with a token that one of its own sees; by brute force."""
    pieces = [{r, 2 * ranks - 1 - r} for r in range(ranks)]

    def seen(query: int, key: int) -> bool:
        places = ((q, k) for q in range(tokens) for k in range(tokens))
        between = [query * tokens + q - key * tokens - k for q, k in places]
        return any(0 <= d < (case.window or 2 * ranks * tokens) for d in between)

    mine, others = pieces[rank], set(range(2 * ranks)) - pieces[rank]
    return sum(any(seen(query, key) for query in mine) for key in others)


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_attention_by_messages_equals_that_of_one_process(name, ranks):
    """Results and gradients; and each rank receives the pieces that it looks at, once there and once back."""
    case = CASES[name]
    everyone = run_ranks(attended, ranks, *case)
    piece = BATCH * case.kv_heads * WIDTH * (HEAD_DIM + case.value_dim)
    sizes = (2, 4) if case.dtype == "bfloat16" else (8, 8)
    pieces = [travels(case, rank, ranks) for rank in range(ranks)]
    for (far, there, back), received in zip(everyone, pieces, strict=True):
        assert max(far) < (1e-2 if case.dtype == "bfloat16" else 1e-14)
        assert there["recv"] == received * piece * sizes[0]
        # gradients of what was received are sent back, in float32 at least
        assert back["send"] - there["send"] == received * piece * sizes[1]
    for kind in ("there", "back"):
        sums = [
            sum((there if kind == "there" else back)[k] for _, there, back in everyone) for k in Sent().bytes
        ]
        assert sums[0] == sums[1] == sum(pieces) * piece * sum(sizes[: 1 + (kind == "back")])
    if case.window is None:  # the gather brings 2 (ranks - 1) pieces to each
        assert sum(pieces) == 3 * ranks * (ranks - 1) // 2


def refused(attention: GroupedQueryConfig) -> str:
    mesh = build_mesh(MeshConfig(cp=2), Env.detect())
    config = DecoderConfig(vocab_size=64, dim=32, num_layers=1, max_tokens=16, attention=attention)
    with torch.device("meta"):
        model = config.build()
    with pytest.raises(ParallelError) as error:
        parallelize(
            model, mesh, Plan.of(model), ParallelConfig(context_parallel=ContextParallelConfig(method="ring"))
        )
    return str(error.value)


@pytest.mark.dist
def test_attention_that_is_more_than_softmax_is_refused():
    capped = GroupedQueryConfig(num_heads=4, softcap=2.0)
    assert all("layers.0.attention" in told and "gather" in told for told in run_ranks(refused, 2, capped))
    config = DecoderConfig(vocab_size=64, dim=32, num_layers=1, max_tokens=16, attention=capped)
    with pytest.raises(ValueError, match=r'layer 0: softcap .* "gather" or "ulysses"'):
        config.require_axes(1, 2, True, "ring")
    config.require_axes(1, 2, True, "gather")


def test_blocks_that_are_compiled_are_refused():
    with pytest.raises(ValueError, match=r'"ring" sends messages .* compile.enabled = false'):
        ParallelConfig(
            context_parallel=ContextParallelConfig(method="ring"), compile=CompileConfig(enabled=True)
        )


def test_tokens_that_see_later_ones_are_refused():
    ring = Ring(explicit_attention, Cut(None, 2))
    with pytest.raises(ParallelError, match="ulysses"):
        ring.resolve(Mask(4, torch.device("cpu"), causal=False), None)
