"""No step makes the host wait for the device: whatever would is an operation that is looked for here.

Works without a device: what reads a tensor on the host, or copies a number of the host to a device, is one.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from forge_data.loading.loader import MicroBatch
from forge_model import DecoderConfig, LossConfig, initialize
from forge_model.config import (
    ExpertChoiceConfig,
    LatentConfig,
    MoEConfig,
    SigmoidRouterConfig,
    SoftmaxRouterConfig,
)
from forge_model.decoder.mtp_config import MTPConfig
from forge_parallel import (
    Env,
    MeshConfig,
    ParallelConfig,
    Plan,
    build_mesh,
    local_shard,
    parallelize,
    process_group,
)
from forge_parallel.apply import materialize
from forge_parallel.config import ActivationCheckpointingConfig, PrecisionConfig
from forge_parallel.fp8_config import FP8Config
from forge_trainer.optim import (
    AdamWConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleFreeAdamWConfig,
    trainable,
)
from forge_trainer.optim.local_parameters import LocalOptimizer
from forge_trainer.schedule import CosineConfig
from forge_trainer.steps.text import TextStep
from forge_trainer.steps.update import Update
from forge_vlm.fusion.moma_config import MomaConfig
from host_waits import Reads, Waits

CPU = torch.device("cpu")


def model(**parts: Any) -> DecoderConfig:
    return DecoderConfig(vocab_size=64, dim=64, num_layers=2, max_tokens=32, **parts)


def moe(router: Any, **options: Any) -> DecoderConfig:
    return model(ffn=MoEConfig(num_experts=4, top_k=2, dim=32, router=router, **options))


SIGMOID = SigmoidRouterConfig(sequence_balance_weight=0.1, z_loss_weight=0.1, groups=2, top_groups=1)
ADAMW, PURE = AdamWConfig(), ParallelConfig(precision=PrecisionConfig(pure_bf16=True))
MATRIX: dict[str, tuple[DecoderConfig, OptimizerConfig, ParallelConfig]] = {
    "dense": (model(), ADAMW, ParallelConfig()),
    "tied": (model(tie_embeddings=True), ADAMW, ParallelConfig()),
    "latent": (
        model(attention=LatentConfig(num_heads=2, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16)),
        ADAMW,
        ParallelConfig(),
    ),
    "further tokens": (model(mtp=MTPConfig(num_modules=1)), ADAMW, ParallelConfig()),
    "sigmoid": (moe(SIGMOID, shared_experts=1), ADAMW, ParallelConfig()),
    "capacity": (moe(SIGMOID, capacity_factor=1.0), ADAMW, ParallelConfig()),
    "softmax": (moe(SoftmaxRouterConfig(batch_balance_weight=0.1)), ADAMW, ParallelConfig()),
    "experts choose": (moe(ExpertChoiceConfig(z_loss_weight=0.1)), ADAMW, ParallelConfig()),
    "moma": (MomaConfig(gumbel_noise=True, normalize=True).decoder(model()), ADAMW, ParallelConfig()),
    "recomputed": (
        moe(SIGMOID),
        ADAMW,
        ParallelConfig(activation_checkpointing=ActivationCheckpointingConfig(mode="full")),
    ),
    "selective": (
        model(),
        ADAMW,
        ParallelConfig(activation_checkpointing=ActivationCheckpointingConfig(mode="selective")),
    ),
    "fp8": (model(), ADAMW, ParallelConfig(fp8=FP8Config(recipe="tensorwise", min_size=16, emulate=True))),
    "bf16": (model(), ADAMW, ParallelConfig(precision=PrecisionConfig(compute="bfloat16"))),
    "pure": (model(), ADAMW, PURE),
    "rounded": (model(), AdamWConfig(rounding="stochastic", moments="bfloat16"), PURE),
    "averaged": (model(), AdamWConfig(ema_decay=0.9), ParallelConfig()),
    "lion": (model(), LionConfig(), ParallelConfig()),
    "muon": (moe(SIGMOID), MuonConfig(scale="original"), ParallelConfig()),
    "schedule-free": (model(), ScheduleFreeAdamWConfig(), ParallelConfig()),
}


def batch(documents: bool, needs: Iterable[str]) -> list[MicroBatch]:
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(2):
        rows = torch.randint(64, (2, 33), generator=generator)
        inputs = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
        if documents:
            ids = (torch.arange(32) // 10).expand(2, -1)
            inputs |= {"doc_ids": ids, "positions": torch.arange(32).expand(2, -1) - 10 * ids}
        if "modality" in needs:
            inputs["modality"] = (torch.arange(32) // 8 % 3).expand(2, -1)
        statistics = {"targets": torch.tensor(64), "source": torch.tensor([0, 1])}
        found.append(MicroBatch(inputs, statistics, ("a", "b")))
    return found


@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("name", MATRIX)
def test_step_never_waits_for_the_device(name, documents, monkeypatch):
    config, optimizer, parallel = MATRIX[name]
    monkeypatch.setattr(LocalOptimizer, "finite", lambda self: self.found_inf == 0)  # as on a device
    env = Env(0, 0, 1, CPU, "none")
    with process_group(env, needed=parallel.needs_group("cpu")):
        mesh = build_mesh(MeshConfig(), env)
        with torch.device("meta"):
            built = config.build()
        parallelize(built, mesh, Plan.of(built), parallel)
        initialize(materialize(built, CPU), 0, local_shard)
        for module in built.modules():
            if hasattr(module, "_fused"):
                module._fused = False  # as on a device, where all experts are one product
        made = optimizer.build(trainable([built]), mesh)
        update = Update([built], made, partial(CosineConfig(warmup_steps=2).factor, steps=9), 1.0, mesh)
        step = TextStep([built], LossConfig().build(), mesh, update=update)
        inputs = batch(documents, config.side_inputs())
        for index in range(2):
            step.train(inputs, index)
        with Waits() as waits, Reads() as reads:
            step.train(inputs, 2)
    assert not waits.found.total() and not reads.found, (waits.found, reads.found)
