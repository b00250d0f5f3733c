"""Random routings under expert parallelism against dense products. N tokens, E experts, D model dim."""

from collections import Counter
from copy import deepcopy
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forge_model.config import MoEConfig
from forge_model.moe.balance import EXTRAS
from forge_model.moe.layer import MoE
from forge_model.moe.router import Routed
from forge_model.moe.routing import Routing, one_per_slot
from forge_parallel import Env, MeshConfig, ParallelConfig, Plan, build_mesh, local_shard, parallelize
from forge_parallel.testing import run_ranks
from torch import Tensor, nn

DIM, HIDDEN, ROUTINGS = 8, 16, 200
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
PLAN = Plan(blocks="layers.*", experts=["layers.*"])


class Told(nn.Module):
    """A router that says what it has been told."""

    routing: Routing

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, sum_over_sequence: object, padding: object) -> Routed:
        zero = self.routing.weights.new_zeros(())
        return Routed(self.routing, zero, torch.zeros(self.experts + len(EXTRAS), dtype=torch.float64))


class OneLayer(nn.Module):
    def __init__(self, layer: MoE) -> None:
        super().__init__()
        layer.router, layer.step_tokens = Told(layer.num_experts), 1
        self.layers = nn.ModuleList([layer])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def chosen(seed: int, experts: int, tokens: int, top_k: int) -> Tensor:
    """[N, K]: of tied scores, all of one expert, those of one rank, or any."""
    if seed % 4 == 0:
        return torch.randint(2, (tokens, experts)).topk(top_k).indices
    among = (experts, 1, max(1, experts // 4), experts)[seed % 4]
    return torch.randint(among, (tokens, top_k)) + int(torch.randint(experts - among + 1, ()))


def drawn(seed: int, experts: int, ranks: int, dtype: torch.dtype) -> list[tuple[Tensor, Routing, Tensor]]:
    """Tokens of each rank, perhaps none; who serves them; the gradient of what they become."""
    torch.manual_seed(seed)
    top_k, found = int(torch.randint(1, 4, ())), []
    for _ in range(ranks):
        tokens = int(torch.randint(14, ()))
        x, through = torch.randn(2, tokens, DIM).to(dtype)
        routing = one_per_slot(chosen(seed, experts, tokens, top_k), torch.rand(tokens, top_k).to(dtype))
        if seed % 5 == 0:  # the order of no token
            order = torch.randperm(tokens * top_k)
            routing = Routing(*(one[order] for one in routing[:3]))
        found.append((x, routing, through))
    return found


def dense(layer: MoE, x: Tensor, routing: Routing, capacity: int | None, by_weight: bool) -> Tensor:
    """Every expert serves every token, [N, D]; in float64."""
    used, kept = Counter[int](), torch.ones(len(routing.experts), dtype=torch.float64)
    pairs = list(enumerate(routing.experts.tolist()))
    if by_weight:
        pairs.sort(key=lambda pair: -routing.weights[pair[0]].item())
    for pair, expert in pairs:
        used[expert] += 1
        kept[pair] = float(capacity is None or used[expert] <= capacity)
    gates = torch.zeros(len(x), layer.num_experts, dtype=torch.float64)
    gates = gates.index_put(
        (routing.tokens, routing.experts), kept * routing.weights.double(), accumulate=True
    )
    made = {name: parameter.double() for name, parameter in layer.experts.named_parameters()}

    def projected(letter: str, rows: str, x: Tensor) -> Tensor:
        return torch.einsum(f"{rows},eoi->neo", x, made[f"w_{letter}"]) + made.get(f"b_{letter}", 0)

    up = projected("up", "ni", x.double())
    hidden = F.silu(projected("gate", "ni", x.double())) * up if "w_gate" in made else F.silu(up)
    return torch.einsum("ne,neo->no", gates, projected("down", "nei", hidden))


class Checked:
    """A layer of experts on these ranks, and the same whole."""

    def __init__(self, ep: int, dtype: torch.dtype) -> None:
        self.mesh, self.dtype = build_mesh(MeshConfig(ep=ep), Env.detect()), dtype
        self.model = cache(self._model)

    def _model(self, experts: int, gated: bool, bias: bool) -> tuple[OneLayer, OneLayer]:
        torch.manual_seed(experts)
        config = MoEConfig(num_experts=experts, top_k=1, dim=HIDDEN, gated=gated, bias=bias)
        plain = OneLayer(config.build(DIM)).to(self.dtype)
        for parameter in plain.parameters():
            parameter.data = 0.4 * torch.randn_like(parameter)
        cut = deepcopy(plain)
        parallelize(cut, self.mesh, PLAN, ParallelConfig())
        return plain, cut

    def check(self, seed: int) -> None:
        """What this rank makes of its tokens, and all gradients, of one routing."""
        experts, capacity = (4, 8, 12)[seed % 3], (None, 1, None, 2)[seed // 4 % 4]
        by_weight = seed // 2 % 2 > 0
        plain, cut = self.model(experts, seed % 2 > 0, seed // 2 % 2 > 0)
        data = drawn(seed, experts, dist.get_world_size(), self.dtype)
        leaves, outs = [], []
        for x, routing, _ in data:
            leaves.append((x.clone().requires_grad_(), routing.weights.clone().requires_grad_()))
            told = routing._replace(weights=leaves[-1][1])
            outs.append(dense(plain.layers[0], leaves[-1][0], told, capacity, by_weight))
        plain.zero_grad()
        total = sum((out * through).sum() for out, (_, _, through) in zip(outs, data, strict=True))
        total.backward()

        x, routing, through = data[dist.get_rank()]
        x, weights = x[None].requires_grad_(), routing.weights.requires_grad_()
        layer = cut.layers[0]
        layer.router.routing = routing
        even = max(1, len(x[0])) * layer.top_k / experts  # what is multiplied, and rounded up
        layer.capacity_factor = None if capacity is None else (capacity - 0.5) / even
        layer.drop_by_weight = by_weight
        cut.zero_grad()
        out = cut(x)
        (out[0] * through).sum().backward()

        mine = leaves[dist.get_rank()]
        self.near(out[0], outs[dist.get_rank()])
        self.near(x.grad[0], mine[0].grad)
        self.near(weights.grad, mine[1].grad)
        for name, parameter in plain.named_parameters():
            reference = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            values, offsets, _ = local_shard(cut.get_parameter(name).grad)
            box = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            self.near(values, reference[box])

    def near(self, value: Tensor, reference: Tensor) -> None:
        """Equal but for rounding, which is that of the largest of the numbers that are summed."""
        assert value.dtype == self.dtype and value.shape == reference.shape
        bound = TOLERANCE[str(self.dtype).removeprefix("torch.")]
        largest = max([1.0, *reference.abs().flatten().tolist()])
        torch.testing.assert_close(value.double(), reference.double(), rtol=0, atol=bound * largest)


def check(ep: int, dtype: str, seeds: range) -> None:
    checked = Checked(ep, getattr(torch, dtype))
    for seed in seeds:
        try:
            checked.check(seed)
        except Exception as error:
            raise AssertionError(f"routing {seed}") from error


@pytest.mark.dist
@pytest.mark.parametrize(
    ("ranks", "ep", "dtype", "step"),
    [
        (2, 2, "float64", 9),
        *(pytest.param(*case, 1, marks=pytest.mark.slow) for case in ((2, 2, "float32"), (2, 2, "float64"))),
        *(pytest.param(*case, 1, marks=pytest.mark.slow) for case in ((4, 4, "float32"), (4, 4, "float64"))),
        pytest.param(4, 2, "float64", 1, marks=pytest.mark.slow),
    ],
)
def test_random_routings_over_ranks_equal_dense_products(ranks, ep, dtype, step):
    run_ranks(check, ranks, ep, dtype, range(0, ROUTINGS, step), timeout_s=200)
