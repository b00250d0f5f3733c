import math

import pytest
import torch
from forge_interp.errors import InterpError
from forge_interp.lenses.lens import logit_lens, read_lens
from forge_interp.lenses.unembedding import Unembedding
from torch import Tensor, nn


class TinyLM(nn.Module):
    def __init__(self, vocab: int = 40, dim: int = 8, num_layers: int = 3, cap: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Tanh()) for _ in range(num_layers)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)
        nn.init.normal_(self.norm.weight)
        self.stream = nn.ModuleList(nn.Identity() for _ in range(num_layers))
        self.cap = cap

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embed(tokens) * scale
        for layer, stream in zip(self.layers, self.stream, strict=True):
            x = stream(x + layer(x))
        logits = self.head(self.norm(x))
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


TOKENS = torch.arange(14).view(2, 7) % 5


def test_logit_lens_is_the_models_own_prediction_at_the_last_layer_bit_for_bit():
    model = TinyLM()
    result = logit_lens(model, "stream.*", TOKENS, keep_logits=True, scale=1.5)
    own = model(TOKENS, scale=1.5)
    assert torch.equal(result.logits["stream.2:out"], own)
    assert not torch.equal(result.logits["stream.1:out"], own)
    assert torch.equal(result.top_ids[-1, ..., 0], own.argmax(-1))
    assert result.kl[-1].abs().max() < 1e-6 < 1e-3 < result.kl[0].min()


def test_logit_lens_summaries_equal_the_definitions_on_the_full_logits():
    model, targets = TinyLM().double(), TOKENS.roll(-1, 1).clone()
    targets[0, 3] = -100
    result = logit_lens(model, ["embed", "stream.*"], TOKENS, targets=targets, top_k=3)
    assert result.sites == ("embed:out", "stream.0:out", "stream.1:out", "stream.2:out")
    assert result.logits is None
    final = model(TOKENS).log_softmax(-1)
    x = model.embed(TOKENS)
    for i in range(4):
        log_probs = model.head(model.norm(x)).log_softmax(-1)
        probs = log_probs.exp()
        top = probs.topk(3)
        assert torch.equal(result.top_ids[i], top.indices)
        torch.testing.assert_close(result.top_probs[i], top.values)
        torch.testing.assert_close(result.entropy[i], -(probs * log_probs).sum(-1))
        torch.testing.assert_close(result.kl[i], (final.exp() * (final - log_probs)).sum(-1))
        order = log_probs.argsort(-1, descending=True)
        rank = (order == targets[..., None]).float().argmax(-1)
        valid = targets >= 0
        assert torch.equal(result.target_rank[i][valid], rank[valid])
        assert result.target_rank[i][~valid].tolist() == [-1]
        own = log_probs.gather(-1, targets.clamp_min(0)[..., None])[..., 0]
        torch.testing.assert_close(result.target_log_prob[i][valid], own[valid])
        assert result.target_log_prob[i][~valid].isnan().all()
        if i < 3:
            x = x + model.layers[i](x)


def test_logit_lens_in_pieces_never_holds_more_than_max_bytes_of_logits():
    model = TinyLM()
    rows = []

    def head(x: Tensor) -> Tensor:
        rows.append(math.prod(x.shape[:-1]))
        return model.head(x)

    whole = logit_lens(model, "stream.*", TOKENS, targets=TOKENS, head="head")
    pieces = logit_lens(
        model, "stream.*", TOKENS, targets=TOKENS, head=head, max_bytes=6 * 4 * 40 * 3, check=False
    )
    assert max(rows) == 3
    for name in ("top_ids", "target_rank"):
        assert torch.equal(getattr(pieces, name), getattr(whole, name))
    for name in ("top_probs", "entropy", "kl", "target_log_prob"):
        torch.testing.assert_close(getattr(pieces, name), getattr(whole, name))


def test_read_lens_reads_given_activations_without_a_final_distribution():
    model = TinyLM()
    unembedding = Unembedding(model)
    hidden = torch.randn(4, 8)
    result = read_lens({"mine": hidden}, lambda site, x: unembedding(x), targets=torch.arange(4), top_k=1)
    assert result.kl is None
    assert torch.equal(result.top_ids[0, :, 0], model.head(model.norm(hidden)).argmax(-1))
    assert result.target_rank.shape == (1, 4)


def test_divergence_ignores_tokens_that_the_final_distribution_rules_out():
    model = TinyLM()
    final = model(TOKENS).detach()
    final[..., 30:] = -torch.inf
    result = read_lens({"x": torch.randn(2, 7, 8)}, lambda site, x: Unembedding(model)(x), final=final)
    assert result.kl.isfinite().all()


def test_logit_lens_notices_a_soft_cap_and_takes_it_as_a_function():
    model = TinyLM(cap=0.5)
    with pytest.raises(InterpError, match=r"norm=norm, head=head differ.*soft cap"):
        logit_lens(model, "stream.*", TOKENS)
    result = logit_lens(
        model, "stream.*", TOKENS, head=lambda x: 0.5 * torch.tanh(model.head(x) / 0.5), keep_logits=True
    )
    assert torch.equal(result.logits["stream.2:out"], model(TOKENS))
    unchecked = logit_lens(model, "stream.*", TOKENS, check=False)
    assert unchecked.kl[-1].max() > 1e-3


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.001), (torch.float64, 1 + 1e-7)])
def test_logit_lens_notices_a_small_factor_but_allows_for_rounding(dtype, factor):
    model = TinyLM().to(dtype)
    forward = model.forward
    model.forward = lambda tokens: forward(tokens) * factor
    with pytest.raises(InterpError, match="norm=norm, head=head differ"):
        logit_lens(model, "stream.*", TOKENS)

    def halves(tokens: Tensor) -> Tensor:
        x = tokens
        forward(x)
        hidden = model.norm(ends[-1])
        parts = [hidden[..., cut] @ model.head.weight[:, cut].T for cut in (slice(4), slice(4, 8))]
        return parts[1] + model.head.bias + parts[0]

    ends: list[Tensor] = []
    model.stream[2].register_forward_hook(lambda module, args, output: ends.append(output))
    model.forward = halves
    with torch.no_grad():
        assert not torch.equal(halves(TOKENS), forward(TOKENS))
    logit_lens(model, "stream.*", TOKENS)


def test_logit_lens_compares_at_the_last_call_of_the_norm():
    model = TinyLM()
    forward = model.forward
    model.forward = lambda tokens: (model.norm(model.embed(tokens)), forward(tokens))[1]
    logit_lens(model, "stream.*", TOKENS)


def test_logit_lens_compares_at_the_head_where_there_is_no_norm():
    model = TinyLM()
    model.norm = nn.Identity()
    logit_lens(model, "stream.*", TOKENS, norm=nn.Identity())
    forward = model.forward
    model.forward = lambda tokens: 2 * forward(tokens)
    with pytest.raises(InterpError, match=r"norm=\(given\), head=head differ"):
        logit_lens(model, "stream.*", TOKENS, norm=nn.Identity())


def test_logit_lens_allows_for_the_rounding_of_the_coarser_of_two_dtypes():
    model = TinyLM().bfloat16()
    forward = model.forward
    inputs: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, args, output: inputs.append(output))

    def widened(tokens: Tensor) -> Tensor:
        forward(tokens)
        return nn.functional.linear(inputs[-1].float(), model.head.weight.float(), model.head.bias.float())

    model.forward = widened
    result = logit_lens(model, "stream.*", TOKENS)
    assert 0 < result.kl[-1].abs().max() < 1e-3


def test_logit_lens_takes_tokens_that_the_head_rules_out():
    model = TinyLM()

    def head(x: Tensor) -> Tensor:
        logits = model.head(x)
        return torch.cat([logits[..., :30], torch.full_like(logits[..., 30:], -torch.inf)], dim=-1)

    forward = model.forward
    model.forward = lambda tokens: torch.where(torch.arange(40) < 30, forward(tokens), -torch.inf)
    result = logit_lens(model, "stream.*", TOKENS, head=head)
    assert result.kl.isfinite().all() and result.kl[-1].abs().max() < 1e-6
    assert result.entropy.isfinite().all() and result.top_ids.max() < 30
    with pytest.raises(InterpError, match="differ from the model's own logits by up to inf"):
        logit_lens(model, "stream.*", TOKENS)


def test_logit_lens_notices_a_wrong_norm():
    model = TinyLM()
    model.final_norm = nn.LayerNorm(8)
    with pytest.raises(InterpError, match=r"norm of TinyLM is ambiguous: norm, final_norm"):
        logit_lens(model, "stream.*", TOKENS)
    with pytest.raises(InterpError, match="captured nothing at 'final_norm:in'"):
        logit_lens(model, "stream.*", TOKENS, norm="final_norm")
    model.layers[0] = nn.Sequential(model.final_norm, nn.Linear(8, 8))
    with pytest.raises(InterpError, match="norm=final_norm, head=head differ"):
        logit_lens(model, "stream.*", TOKENS, norm="final_norm")


def test_logit_lens_refuses_what_does_not_fit():
    model = TinyLM()
    with pytest.raises(InterpError, match=r"top_k is 41; expected 1 to 40"):
        logit_lens(model, "stream.*", TOKENS, top_k=41)
    with pytest.raises(InterpError, match=r"targets': \(2, 6\)"):
        logit_lens(model, "stream.*", TOKENS, targets=TOKENS[:, 1:])
    with pytest.raises(InterpError, match=r"stream\.9"):
        logit_lens(model, "stream.9", TOKENS)
    with pytest.raises(InterpError, match=r"do not fit together .*mat1 and mat2"):
        logit_lens(model, "stream.*", TOKENS, head=nn.Linear(4, 40))
    with pytest.raises(InterpError, match=r"shape \(2, 7, 3\); expected \(2, 7, 40\)"):
        logit_lens(model, "stream.*", TOKENS, head=nn.Linear(8, 3))
    model.forward = lambda tokens: model.norm(model.embed(tokens)).mean()
    with pytest.raises(InterpError, match=r"a tensor of shape \(\) and dtype torch\.float32"):
        logit_lens(model, "embed", TOKENS)
    model.forward = lambda tokens: {"loss": model.head(model.norm(model.embed(tokens))).mean()}
    with pytest.raises(InterpError, match=r"a dict with \['loss'\]; expected logits.*without labels"):
        logit_lens(model, "embed", TOKENS)


def families():
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {**small, "intermediate_size": 32, "num_key_value_heads": 1}
    return {
        "Llama": (transformers.LlamaConfig(**more), "model.layers.1"),
        "GPT2": (transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2), "transformer.h.1"),
        "GPTNeoX": (transformers.GPTNeoXConfig(**small, intermediate_size=32), "gpt_neox.layers.1"),
        "Qwen3": (transformers.Qwen3Config(**more, head_dim=8), "model.layers.1"),
        "Gemma": (transformers.GemmaConfig(**more, head_dim=8), "model.layers.1"),
        "Mixtral": (transformers.MixtralConfig(**more, num_local_experts=2), "model.layers.1"),
        "Gemma2": (
            transformers.Gemma2Config(**more, head_dim=8, final_logit_softcapping=0.1),
            "model.layers.1",
        ),
        "Mamba": (
            transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2),
            "backbone.layers.1",
        ),
        "OPT": (
            transformers.OPTConfig(**small, ffn_dim=32, word_embed_proj_dim=16),
            "model.decoder.layers.1",
        ),
    }


@pytest.mark.parametrize(
    "family", ["Llama", "GPT2", "GPTNeoX", "Qwen3", "Gemma", "Mixtral", "Gemma2", "Mamba", "OPT"]
)
def test_logit_lens_of_hugging_face_models_is_exact_at_the_last_layer(family):
    transformers = pytest.importorskip("transformers")
    config, last = families()[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    inputs = {"input_ids": torch.arange(10).view(2, 5), "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    head = None
    if family == "Gemma2":
        with pytest.raises(InterpError, match="soft cap"):
            logit_lens(model, last, **inputs)

        def head(x):
            return 0.1 * torch.tanh(model.lm_head(x) / 0.1)

    result = logit_lens(model, last, head=head, keep_logits=True, **inputs)
    own = model(**inputs).logits
    assert torch.equal(result.logits[f"{last}:out"], own)
