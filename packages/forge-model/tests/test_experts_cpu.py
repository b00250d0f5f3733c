"""Experts by blocks of rows, as on a CPU, against all rows at once, as on a GPU."""

import pytest
import torch
from forge_model import experts_cpu
from forge_model.experts import Experts, Pairs
from forge_model.routing import in_order, one_per_slot, serve, within_capacity


@pytest.mark.parametrize("block", [1, 5, 1024])
@pytest.mark.parametrize("capacity", [None, 3])
@pytest.mark.parametrize(("gated", "bias"), [(True, False), (True, True), (False, True)])
def test_blocks_of_rows_equal_all_rows_at_once(block, capacity, gated, bias, monkeypatch):
    monkeypatch.setattr(experts_cpu, "BLOCK_ROWS", block)
    torch.manual_seed(0)
    experts = Experts(6, 8, 5, "silu", gated, bias).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    chosen = torch.stack([torch.randperm(5)[:3] for _ in range(9)])  # the last expert has no token
    weights = torch.rand(9, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for blocks in (False, True):
        routing = one_per_slot(chosen, weights)
        if capacity is not None:
            routing = within_capacity(routing, 6, capacity)
        order, ends = in_order(routing, 6)
        pairs = Pairs(routing.tokens[order], routing.weights[order])
        out = experts(x, ends, pairs) if blocks else serve(experts, x, routing, 6)
        loss = (out * torch.arange(8)).sum()
        found.append([out, *torch.autograd.grad(loss, [x, weights, *experts.parameters()])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)
