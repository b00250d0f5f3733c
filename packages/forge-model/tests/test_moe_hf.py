"""Layers of experts and their losses against those of transformers, with the same random weights."""

import pytest
import torch
from forge_model.config import MoEConfig, SigmoidRouterConfig, SoftmaxRouterConfig

pytest.importorskip("transformers")
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2

DIM, WIDTH, EXPERTS = 16, 24, 8
SIZES = {"hidden_size": DIM, "moe_intermediate_size": WIDTH}
LAYERS = {
    "mixtral": (
        mixtral.MixtralSparseMoeBlock,
        mixtral.MixtralConfig(hidden_size=DIM, intermediate_size=WIDTH, num_local_experts=EXPERTS),
        MoEConfig(dim=WIDTH),
    ),
    "olmoe": (
        olmoe.OlmoeSparseMoeBlock,
        olmoe.OlmoeConfig(
            hidden_size=DIM, intermediate_size=WIDTH, num_experts=EXPERTS, num_experts_per_tok=3
        ),
        MoEConfig(dim=WIDTH, top_k=3, router=SoftmaxRouterConfig(normalize=False)),
    ),
    "qwen2": (
        qwen2.Qwen2MoeSparseMoeBlock,
        qwen2.Qwen2MoeConfig(
            **SIZES, num_experts=EXPERTS, shared_expert_intermediate_size=40, num_experts_per_tok=3
        ),
        MoEConfig(
            dim=WIDTH,
            top_k=3,
            router=SoftmaxRouterConfig(normalize=False),
            shared_experts=1,
            shared_dim=40,
            shared_gate=True,
        ),
    ),
    "deepseek_v3": (
        deepseek.DeepseekV3MoE,
        deepseek.DeepseekV3Config(
            **SIZES,
            n_routed_experts=EXPERTS,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            num_experts_per_tok=3,
            routed_scaling_factor=2.5,
        ),
        MoEConfig(
            dim=WIDTH,
            top_k=3,
            router=SigmoidRouterConfig(groups=4, top_groups=2, scale=2.5),
            shared_experts=2,
        ),
    ),
}


def copy_weights(theirs, ours) -> None:
    gate, up = theirs.experts.gate_up_proj.chunk(2, dim=1)
    pairs = [
        (ours.experts.w_gate, gate),
        (ours.experts.w_up, up),
        (ours.experts.w_down, theirs.experts.down_proj),
        (ours.router.weight, theirs.gate.weight),
    ]
    if ours.shared is not None:
        shared = getattr(theirs, "shared_experts", None) or theirs.shared_expert
        names = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}
        pairs += [(getattr(ours.shared, n).weight, getattr(shared, m).weight) for n, m in names.items()]
    if ours.shared_gate is not None:
        pairs.append((ours.shared_gate.weight, theirs.shared_expert_gate.weight))
    if hasattr(theirs.gate, "e_score_correction_bias"):
        pairs.append((ours.router.selection_bias, theirs.gate.e_score_correction_bias))
    with torch.no_grad():
        for mine, source in pairs:
            source.copy_(0.2 * torch.randn_like(source))
            mine.copy_(source)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_that_of_transformers(name):
    torch.manual_seed(0)
    kind, theirs_config, config = LAYERS[name]
    theirs, ours = kind(theirs_config), config.build(DIM)
    copy_weights(theirs, ours)
    x = torch.randn(3, 7, DIM, requires_grad=True)
    mine, reference = ours(x), theirs(x)
    torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)
    through = torch.randn_like(x)
    gradients = (
        torch.autograd.grad(out, [x, router], through)
        for out, router in ((mine, ours.router.weight), (reference, theirs.gate.weight))
    )
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_balance_loss_equals_that_of_transformers_for_a_choice():
    """Theirs grows with the number of choices, ours is 1 for an even load."""
    router = SoftmaxRouterConfig(batch_balance_weight=1.0).build(DIM, EXPERTS, 3)
    router.weight.data.normal_()
    x = torch.randn(4, 9, DIM)
    theirs = mixtral.load_balancing_loss_func((router.logits(x),), EXPERTS, 3)
    torch.testing.assert_close(router(x).loss, theirs / 3)
