"""What `mfu.py` and `moe.py` measure: models, a setting of each, the sweeps around it. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from forge_config import Config
from forge_model.attention.rope_config import RopeConfig
from forge_model.config import (
    GroupedQueryConfig,
    ModelConfig,
    MoEConfig,
    SigmoidRouterConfig,
    SwiGLUConfig,
)
from forge_model.decoder.config import DecoderConfig
from forge_parallel.compile_config import CompileConfig
from forge_parallel.config import ActivationCheckpointingConfig, ParallelConfig, PrecisionConfig
from forge_parallel.fp8_config import FP8Config

VOCAB = 128256
PEAKS = Path(__file__).resolve().parents[1] / "results" / "traced_peaks.json"


def _llama(dim: int, layers: int, heads: int, ffn: int, tied: bool) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=VOCAB,
        max_tokens=1 << 17,
        dim=dim,
        num_layers=layers,
        attention=GroupedQueryConfig(num_heads=heads, num_kv_heads=8),
        ffn=SwiGLUConfig(dim=ffn),
        rope=RopeConfig(theta=500000.0),
        tie_embeddings=tied,
    )


ROUTER = SigmoidRouterConfig(sequence_balance_weight=1e-4)


def _experts(dim: int, layers: int, heads: int, experts: int, top_k: int, ffn: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=VOCAB,
        max_tokens=1 << 17,
        dim=dim,
        num_layers=layers,
        attention=GroupedQueryConfig(num_heads=heads, num_kv_heads=4, head_dim=128, qk_norm=True),
        ffn=MoEConfig(num_experts=experts, top_k=top_k, dim=ffn, router=ROUTER),
        rope=RopeConfig(theta=1000000.0),
    )


MODELS: dict[str, DecoderConfig] = {
    "1b": _llama(2048, 16, 32, 8192, True),
    "3b": _llama(3072, 28, 24, 8192, True),
    "8b": _llama(4096, 32, 32, 14336, False),
    "tiny": DecoderConfig(vocab_size=256, max_tokens=512, dim=64, num_layers=2),
    "moe-4b": _experts(2048, 12, 32, 64, 8, 768),
    "tiny-moe": DecoderConfig(
        vocab_size=256,
        max_tokens=512,
        dim=64,
        num_layers=2,
        ffn=MoEConfig(num_experts=8, top_k=2, dim=32, router=ROUTER),
    ),
}
"""The shapes of Llama 3.2 1B and 3B and Llama 3 8B; 12 layers as those of Qwen3-30B-A3B (arXiv:2505.09388)
with 64 experts instead of 128; and two for a test on a CPU."""


class Case(Config):
    """One setting of one model on one GPU.

    Attributes:
        model: of `MODELS`.
        tokens: of a sequence.
        micro_batch: sequences at once, one micro-batch a step.
        recompute: `[activation_checkpointing] mode`; `every-2` and `budget-0.5` carry their number.
        compile: whether blocks are compiled.
        fp8: `[fp8] recipe`.
        state: `float32`: weights, gradients and moments in float32 (16 bytes a parameter); `moments-bf16`:
            the moments in bfloat16 (12 bytes); `bf16`: all in bfloat16 (8 bytes), as KempnerForge trains.
        documents: tokens of a packed document on average; 0: each sequence is one, under a causal mask.
        routing: `learned` as the router chooses, `forced` so that all experts serve as many tokens; the
            router computes either way.
    """

    model: str
    tokens: int = 4096
    micro_batch: int = 1
    recompute: str = "none"
    compile: bool = True
    fp8: str = "none"
    state: Literal["float32", "moments-bf16", "bf16"] = "float32"
    documents: int = 0
    routing: Literal["learned", "forced"] = "learned"

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return MODELS[self.model]

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return bool(self.config.expert_counts())

    def parallel(self, device_type: str) -> ParallelConfig:
        """What `parallelize` applies; 8 bits are emulated where there is no GPU."""
        mode, _, number = self.recompute.partition("-")
        options: dict[str, Any] = {"every": int(number)} if mode == "every" else {}
        options |= {"budget": float(number)} if mode == "budget" else {}
        emulate = device_type != "cuda" and self.fp8 != "none"
        return ParallelConfig(
            precision=PrecisionConfig(
                compute="auto" if device_type == "cuda" or self.state == "bf16" else "float32",
                pure_bf16=self.state == "bf16",
            ),
            fp8=FP8Config(
                recipe=self.fp8,
                min_size=16 if "tiny" in self.model else 512 if self.has_experts else 1024,
                experts=self.fp8 == "rowwise" and self.has_experts,
                emulate=emulate,
            ),
            activation_checkpointing=ActivationCheckpointingConfig(mode=mode, **options),
            compile=CompileConfig(
                enabled=self.compile and not emulate,
                backend="inductor" if device_type == "cuda" else "aot_eager",
            ),
        )

    @property
    def key(self) -> str:
        """What the memory of a step depends on; see `needed_gib`."""
        fields = (name for name in self.__struct_fields__ if name != "routing")
        return json.dumps({name: getattr(self, name) for name in fields}, sort_keys=True)

    @property
    def needed_gib(self) -> float | None:
        """GiB that a step needs, as `benchmarks/traced.py --peaks` found; None if unknown."""
        if not PEAKS.exists():
            return None
        return json.loads(PEAKS.read_text())["results"].get(self.key)

    def prepare(self, model: Any) -> None:
        """Change the routing of a model, before it is made parallel."""
        if self.routing == "forced":
            for layer in (block.ffn for block in model.layers.values()):
                layer.router.forward = _evenly(layer.router.forward, layer.num_experts)

    def recomputed(self, causal: bool = True) -> float | None:
        """FLOPs a token of matmuls and attention that are done twice; None where the compiler decides."""
        config = self.config
        assert isinstance(config, DecoderConfig)
        head = 6.0 * config.dim * config.vocab_size
        blocks = (config.flops_per_token(self.tokens, causal) - head) / 3
        mode, _, number = self.recompute.partition("-")
        if mode == "budget":
            return None
        if mode == "full":
            return blocks
        if mode == "every":
            return blocks * -(-config.num_layers // int(number)) / config.num_layers
        return 0.0  # `selective` repeats neither matmuls nor attention


def _evenly(route: Any, num_experts: int) -> Any:
    """A router whose choices are replaced by one expert after the other."""

    def forward(*args: Any) -> Any:
        import torch

        routed = route(*args)
        chosen = routed.routing.experts
        even = torch.arange(len(chosen), device=chosen.device) % num_experts
        return routed._replace(routing=routed.routing._replace(experts=even))

    return forward


BASE = {
    "1b": Case(model="1b", micro_batch=8),
    "3b": Case(model="3b", micro_batch=4),
    "8b": Case(model="8b", micro_batch=2, state="moments-bf16"),
    "tiny": Case(model="tiny", tokens=64, micro_batch=2, compile=False),
    "moe-4b": Case(model="moe-4b", micro_batch=4, compile=False, state="moments-bf16"),
    "tiny-moe": Case(model="tiny-moe", tokens=64, micro_batch=2, compile=False),
}
"""The best guess for each model; the sweeps change one thing of it."""

SWEEPS: dict[str, list[dict[str, Any]]] = {
    "base": [{}],
    "recompute": [{"recompute": mode} for mode in ("selective", "every-2", "full", "budget-0.5", "offload")],
    "compile": [{"compile": False}],
    "micro_batch": [{"micro_batch": size} for size in (1, 2, 4, 8, 16)],
    "fp8": [{"fp8": recipe} for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")],
    "state": [{"state": kind} for kind in ("float32", "moments-bf16", "bf16")],
    "documents": [{"documents": 512}],
    "routing": [{"routing": kind} for kind in ("forced", "learned")],
    # what KempnerForge publishes: everything in bfloat16, full recomputation; and the same without it
    "reference": [
        {"state": "bf16", "recompute": mode, "micro_batch": size}
        for mode, size in (("full", 4), ("selective", 4), ("none", 4), ("none", 2))
    ],
}


def cases(models: list[str], sweeps: list[str]) -> list[Case]:
    """Every setting once, in this order."""
    found: list[Case] = []
    for model in models:
        base = BASE[model]
        for change in (change for sweep in sweeps for change in SWEEPS[sweep]):
            fields = {name: getattr(base, name) for name in Case.__struct_fields__} | change
            if fields["recompute"] == "offload":
                fields["compile"] = False
            if fields["recompute"].startswith("budget") and not fields["compile"]:
                continue
            case = Case(**fields)
            if case.routing == "forced" and not case.has_experts:
                continue
            if case not in found:
                found.append(case)
    return found
