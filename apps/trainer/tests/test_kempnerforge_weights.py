"""A checkpoint in KempnerForge's layout, imported, computes what a plain model of its weights computes."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forge_ckpt.cli import main as ckpt
from forge_config.toml import dumps
from forge_trainer.checkpoints.initial_weights import set_initial_weights
from forge_trainer.cli import main
from forge_trainer.config.job import load_job
from torch import nn
from torch.nn import functional as F

DIM, HEADS, KEY_HEADS, VOCAB, WIDE, LENGTH, EXPERTS = 16, 4, 2, 23, 24, 7, 4
DENSE = {
    "dim": DIM,
    "n_layers": 2,
    "n_heads": HEADS,
    "n_kv_heads": KEY_HEADS,
    "vocab_size": VOCAB,
    "ffn_hidden_dim": WIDE,
    "max_seq_len": 32,
}
MIXTURE = DENSE | {"num_experts": EXPERTS, "moe_top_k": 2, "ffn_hidden_dim": 16}
CASES = {
    "dense": DENSE,
    "norms-of-queries-and-keys": DENSE | {"qk_norm": True, "rope_theta": 500.0},
    "gelu-layer-norms-tied": DENSE | {"activation": "gelu", "norm_type": "layernorm", "tie_embeddings": True},
    "experts": MIXTURE | {"moe_frequency": 2},
    "packed-experts": MIXTURE
    | {"moe_packed_experts": True, "moe_router": "sigmoid_topk", "moe_shared_experts": 1},
    "packed-experts-of-relu": MIXTURE | {"moe_packed_experts": True, "activation": "relu"},
}


class Drawn(dict):
    """Random weights under the names of KempnerForge."""

    def __init__(self, model):
        super().__init__()
        self.model, self.draw = model, torch.Generator().manual_seed(3)
        self.gated = model.get("activation", "silu") == "silu"
        embedding = self.random(VOCAB, DIM)
        self["token_embedding.embedding.weight"] = embedding
        tied = model.get("tie_embeddings")
        self["output_head.proj.weight"] = embedding.clone() if tied else self.random(VOCAB, DIM)
        self.norm("norm")
        for layer in range(model["n_layers"]):
            self.attention(f"layers.{layer}")
            dense = "num_experts" not in model or (layer + 1) % model.get("moe_frequency", 1)
            (self.mlp if dense else self.experts)(f"layers.{layer}.mlp")

    def random(self, *shape):
        return torch.randn(*shape, generator=self.draw) / 3

    def norm(self, name):
        self[f"{name}.weight"] = 1 + self.random(DIM)
        if self.model.get("norm_type") == "layernorm":
            self[f"{name}.bias"] = self.random(DIM)

    def attention(self, at):
        width = DIM // HEADS
        self.norm(f"{at}.attention_norm")
        self.norm(f"{at}.mlp_norm")
        for part, heads in (("q", HEADS), ("k", KEY_HEADS), ("v", KEY_HEADS)):
            self[f"{at}.attention.{part}_proj.weight"] = self.random(heads * width, DIM)
        self[f"{at}.attention.o_proj.weight"] = self.random(DIM, DIM)
        if self.model.get("qk_norm"):
            self.update({f"{at}.attention.{part}_norm.weight": 1 + self.random(width) for part in "qk"})

    def mlp(self, name):
        wide = self.model["ffn_hidden_dim"]
        for part in ("gate", "up") if self.gated else ("up",):
            self[f"{name}.{part}_proj.weight"] = self.random(wide, DIM)
        self[f"{name}.down_proj.weight"] = self.random(DIM, wide)

    def experts(self, name):
        wide = self.model["ffn_hidden_dim"]
        self[f"{name}.router.gate.weight"] = self.random(EXPERTS, DIM) * 4
        if self.model.get("moe_router") == "sigmoid_topk":
            self[f"{name}.router.expert_bias"] = torch.zeros(EXPERTS)
            self[f"{name}.router.expert_ema"] = torch.full((EXPERTS,), 1 / EXPERTS)
        if self.model.get("moe_shared_experts"):
            self.mlp(f"{name}.shared_expert")
        if not self.model.get("moe_packed_experts"):
            for expert in range(EXPERTS):
                self.mlp(f"{name}.experts.{expert}")
            return
        for part in ("gate", "up") if self.gated else ("up",):
            self[f"{name}.{part}_w"] = self.random(EXPERTS, DIM, wide)
        self[f"{name}.down_w"] = self.random(EXPERTS, wide, DIM)


def weights(model):
    return dict(Drawn(model))


class Plain:
    """Logits by the definition of the model, in float64, from the names of KempnerForge alone."""

    def __init__(self, model, named):
        self.model, self.w = model, {name: value.double() for name, value in named.items()}
        self.act = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}[model.get("activation", "silu")]

    def norm(self, x, name):
        if self.model.get("norm_type") == "layernorm":
            return F.layer_norm(x, (DIM,), self.w[f"{name}.weight"], self.w[f"{name}.bias"], 1e-5)
        return self.rms(x, name)

    def rms(self, x, name):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.w[f"{name}.weight"]

    def rotated(self, x):
        half = x.shape[-1] // 2
        rates = self.model.get("rope_theta", 10000.0) ** -(torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None, None] * rates
        a, b = x.split(half, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def attention(self, x, at):
        q, k, v = (
            (x @ self.w[f"{at}.{part}_proj.weight"].T).unflatten(-1, (-1, DIM // HEADS)) for part in "qkv"
        )
        if self.model.get("qk_norm"):
            q, k = self.rms(q, f"{at}.q_norm"), self.rms(k, f"{at}.k_norm")
        q, k = self.rotated(q), self.rotated(k)
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // KEY_HEADS)
            scores = q[:, head] @ k[:, group].T / (DIM // HEADS) ** 0.5
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
            heads.append(scores.softmax(-1) @ v[:, group])
        return torch.cat(heads, -1) @ self.w[f"{at}.o_proj.weight"].T

    def mlp(self, x, at):
        if f"{at}.gate_proj.weight" in self.w:
            x = F.silu(x @ self.w[f"{at}.gate_proj.weight"].T) * (x @ self.w[f"{at}.up_proj.weight"].T)
        else:
            x = self.act(x @ self.w[f"{at}.up_proj.weight"].T)
        return x @ self.w[f"{at}.down_proj.weight"].T

    def expert(self, x, at, index):
        if f"{at}.up_w" not in self.w:
            return self.mlp(x, f"{at}.experts.{index}")
        up = x @ self.w[f"{at}.up_w"][index]
        gate = f"{at}.gate_w"
        inner = F.silu(x @ self.w[gate][index]) * up if gate in self.w else self.act(up)
        return inner @ self.w[f"{at}.down_w"][index]

    def experts(self, x, at):
        logits = x @ self.w[f"{at}.router.gate.weight"].T
        scores = logits.sigmoid() if f"{at}.router.expert_bias" in self.w else logits.softmax(-1)
        best, chosen = scores.topk(2)
        best = best / best.sum(-1, keepdim=True)
        rows = []
        for row, weight, index in zip(x, best, chosen, strict=True):
            rows.append(sum(w * self.expert(row, at, int(i)) for w, i in zip(weight, index, strict=True)))
        shared = self.mlp(x, f"{at}.shared_expert") if f"{at}.shared_expert.up_proj.weight" in self.w else 0
        return torch.stack(rows) + shared

    def logits(self, tokens):
        x = self.w["token_embedding.embedding.weight"][tokens]
        for layer in range(self.model["n_layers"]):
            at = f"layers.{layer}"
            x = x + self.attention(self.norm(x, f"{at}.attention_norm"), f"{at}.attention")
            fed = self.experts if f"{at}.mlp.router.gate.weight" in self.w else self.mlp
            x = x + fed(self.norm(x, f"{at}.mlp_norm"), f"{at}.mlp")
        return self.norm(x, "norm") @ self.w["output_head.proj.weight"].T


def saved(folder: Path, named):
    """A folder of a step as its trainer leaves it; the moments stand for the state of the optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moments = {f"state.{name}.exp_avg": torch.zeros_like(value) for name, value in named.items()}
        dcp.save({"model": named, "optimizer": moments}, checkpoint_id=str(folder), no_dist=True)
    (folder / "train_state.pt").write_bytes(b"a pickle that nobody opens")
    (folder / "metadata.json").write_text('{"step": 10}')
    return folder


def configured(tmp_path, model):
    """The configuration of KempnerForge, converted."""
    theirs = {
        "model": model,
        "train": {"batch_size": 2, "seq_len": 16, "max_steps": 5, "mixed_precision": "fp32"},
        "scheduler": {"warmup_steps": 0},
        "data": {"dataset_path": "tokens"},
        "distributed": {"dp_shard": 1},
    }
    (tmp_path / "theirs.toml").write_text(dumps(theirs))
    out = tmp_path / "ours.toml"
    assert main(["convert", str(tmp_path / "theirs.toml"), "--from", "kempnerforge", "--out", str(out)]) == 0
    return out


def imported(tmp_path, named, config):
    saved(tmp_path / "step_10", named)
    return ckpt(["import", str(tmp_path / "step_10"), str(tmp_path / "out"), "--kempnerforge", str(config)])


@pytest.mark.parametrize("case", CASES)
def test_imported_weights_compute_what_a_plain_model_does(tmp_path, case, capsys):
    model, named = CASES[case], weights(CASES[case])
    config = configured(tmp_path, model)
    assert imported(tmp_path, named, config) == 0, capsys.readouterr().err
    job = load_job(config, [f"--train.init_from={tmp_path / 'out'}"], on_paper=True).value
    ours = job.model.build()
    assert isinstance(ours, nn.Module)
    set_initial_weights([ours], job)
    tokens = torch.tensor([1, 5, 2, 22, 3, 3, 0])
    with torch.no_grad():
        apart = (ours.double().eval()(tokens[None])[0] - Plain(model, named).logits(tokens)).abs().max()
    assert apart < 1e-5, apart


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"vision_encoder.patch.weight": torch.ones(2)}, "vision_encoder.patch.weight"),
        ({"layers.0.attention.gate.weight": torch.ones(2)}, "layers.0.attention.gate.weight"),
        ({"layers.1.mlp.router.expert_bias": torch.tensor([0.0, 0.01, 0, 0])}, "is not zero (up to 0.01)"),
        ({"output_head.proj.weight": torch.ones(VOCAB, DIM)}, "tie_embeddings = true, and output_head"),
        ({"layers.0.mlp.experts.1.up_proj.weight": torch.ones(2)}, "made of the experts"),
    ],
)
def test_what_would_compute_something_else_is_refused(tmp_path, changed, said, capsys):
    model = DENSE | {"tie_embeddings": True}
    config = configured(tmp_path, model)
    assert imported(tmp_path, weights(model) | changed, config) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_stages_and_folders_of_steps_are_refused_by_name(tmp_path, capsys):
    config = configured(tmp_path, DENSE)
    saved(tmp_path / "run" / "step_10" / "pp0", weights(DENSE))
    command = ["import", str(tmp_path / "run" / "step_10"), str(tmp_path / "out"), "--kempnerforge"]
    assert ckpt([*command, str(config)]) == 2 and "pipeline stages pp0" in capsys.readouterr().err
    assert ckpt([*command, str(tmp_path / "theirs.toml")]) == 2
    assert "no [model] with num_layers" in capsys.readouterr().err
    saved(tmp_path / "run" / "step_20", weights(DENSE))
    assert ckpt(["import", str(tmp_path / "run"), *command[2:], str(config)]) == 2
    assert "step_20; name one of them" in capsys.readouterr().err


def test_weights_of_other_sizes_are_refused_at_the_start(tmp_path):
    from forge_ckpt.error import CheckpointError

    assert imported(tmp_path, weights(DENSE), configured(tmp_path, DENSE)) == 0
    (tmp_path / "b").mkdir()
    config = configured(tmp_path / "b", DENSE | {"n_layers": 3})
    (tmp_path / "out" / "config.toml").write_text(config.read_text())
    job = load_job(config, [f"--train.init_from={tmp_path / 'out'}"], on_paper=True).value
    with pytest.raises(CheckpointError, match=r"layers\.2\.attention\.wq\.weight is not there"):
        set_initial_weights([job.model.build()], job)
