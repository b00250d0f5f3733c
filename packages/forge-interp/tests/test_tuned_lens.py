import numpy as np
import pytest
import torch
from forge_interp.errors import InterpError
from forge_interp.lenses import tuned_lens
from forge_interp.lenses.lens import logit_lens
from forge_interp.lenses.tuned_lens import TunedLens
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class Rotated(nn.Module):
    """The stream turns by a fixed rotation in each layer: what the middle knows, it says in another basis."""

    def __init__(self, vocab: int = 30, dim: int = 8, num_layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_layers))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)
        nn.init.normal_(self.head.weight, std=0.7)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return (self.head(self.norm(x)),)


TOKENS = torch.arange(30).view(3, 10)
SITES = ["embed", "layers.*"]
EARLY = ["embed", "layers.0", "layers.1"]  # at the last layer the gradient is rounding noise


def test_an_untrained_tuned_lens_is_the_logit_lens():
    model = Rotated()
    lens = TunedLens(model, SITES)
    history = lens.fit([TOKENS], steps=1, lr=0.0)
    before = logit_lens(model, SITES, TOKENS, keep_logits=True)
    result = lens.read(TOKENS, keep_logits=True)
    assert result.sites == before.sites
    for site in result.sites:
        torch.testing.assert_close(result.logits[site], before.logits[site])
    np.testing.assert_allclose(history, before.kl.mean((1, 2))[None].numpy(), atol=1e-6)


def test_tuned_lens_finds_what_rotated_middle_layers_know():
    model = Rotated()
    plain = logit_lens(model, SITES, TOKENS).kl.mean((1, 2))
    lens = TunedLens(model, SITES)
    history = lens.fit([TOKENS[:2], TOKENS[1:]], steps=300, lr=0.05)
    tuned = lens.read(TOKENS).kl.mean((1, 2))
    assert history.shape == (300, 4)
    assert (plain[:3] > 0.5).all()
    assert (tuned[:3] < 0.02).all()
    assert tuned[3] < 1e-4


def test_fit_is_deterministic_and_touches_nothing_of_the_model():
    model = Rotated()
    model.head.weight.requires_grad_(False)
    model.norm.weight.grad = torch.ones(8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lenses = [TunedLens(model, SITES) for _ in range(2)]
    histories = [lens.fit([TOKENS], steps=5, lr=0.05) for lens in lenses]
    np.testing.assert_array_equal(*histories)
    for site, pair in lenses[0].translators.items():
        for one, other in zip(pair, lenses[1].translators[site], strict=True):
            assert torch.equal(one, other)
            assert not one.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.norm.weight.grad, torch.ones(8))
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["norm.weight"]
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["head.weight"]


def test_the_rate_of_fit_falls_linearly():
    lens = TunedLens(Rotated().double(), "embed")
    lens.fit([TOKENS], steps=4, lr=1e-6)  # so small that all gradients are alike, and Adam steps by the rate
    _, bias = lens.translators["embed:out"]
    torch.testing.assert_close(
        bias.abs(), torch.full_like(bias, 1e-6 * (1 + 0.75 + 0.5 + 0.25)), rtol=1e-3, atol=0
    )


def test_fit_equals_a_plain_training_loop():
    model = Rotated().double().requires_grad_(False)
    batches, lr, steps = [TOKENS[:2], TOKENS[1:]], 0.02, 5
    lens = TunedLens(model, "layers.0")
    history = lens.fit(batches, steps=steps, lr=lr)
    translator = nn.Linear(8, 8).double()
    nn.init.zeros_(translator.weight), nn.init.zeros_(translator.bias)
    optimizer = torch.optim.Adam(translator.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses = []
    for step in range(steps):
        tokens = batches[step % 2]
        x = model.layers[0](model.embed(tokens))
        log_probs = model.head(model.norm(x + translator(x))).log_softmax(-1).flatten(0, 1)
        final = model(tokens)[0].log_softmax(-1).flatten(0, 1)
        loss = nn.functional.kl_div(log_probs, final, reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    np.testing.assert_allclose(history[:, 0], losses, rtol=0, atol=1e-10)
    assert losses[4] < losses[2] < losses[0]
    for ours, theirs in zip(lens.translators["layers.0:out"], translator.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-10)


def test_fit_in_pieces_equals_fit_at_once():
    model = Rotated().double()
    whole, pieces = TunedLens(model, EARLY), TunedLens(model, EARLY)
    expected = whole.fit([TOKENS], steps=3, lr=0.05)
    found = pieces.fit([TOKENS], steps=3, lr=0.05, max_bytes=8 * 8 * 30 * 4)
    np.testing.assert_allclose(found, expected, atol=1e-10)
    torch.testing.assert_close(
        whole.translators["embed:out"], pieces.translators["embed:out"], rtol=1e-6, atol=1e-8
    )


def test_fit_leaves_out_padding():
    model = Rotated().double()
    mask = torch.ones_like(TOKENS)
    mask[:, 7:] = 0
    masked, cut = TunedLens(model, EARLY), TunedLens(model, EARLY)
    found = masked.fit([{"tokens": TOKENS, "attention_mask": mask}], steps=4, lr=0.05)
    np.testing.assert_allclose(found, cut.fit([(TOKENS[:, :7],)], steps=4, lr=0.05), atol=1e-10)
    other = TunedLens(model, EARLY)
    given = other.fit([TOKENS], steps=4, lr=0.05, mask=lambda inputs: mask)
    np.testing.assert_array_equal(given, found)
    with pytest.raises(InterpError, match=r"shape \(3,\) and 3 positions; expected \(3, 10\)"):
        other.fit([TOKENS], steps=1, mask=lambda inputs: torch.ones(3))
    with pytest.raises(
        InterpError, match=r"shape \(3, 10\) and 0 positions; expected \(3, 10\) and at least"
    ):
        other.fit([{"tokens": TOKENS, "attention_mask": torch.zeros_like(TOKENS)}], steps=1)


def test_save_and_load_give_the_same_lens(tmp_path):
    model = Rotated().bfloat16()
    lens = TunedLens(model, SITES)
    lens.fit([TOKENS], steps=3, lr=0.05)
    assert lens.translators["layers.1:out"][0].dtype == torch.float32
    lens.save(tmp_path / "lens.safetensors")
    loaded = TunedLens.load(tmp_path / "lens.safetensors", model)
    expected, found = lens.read(TOKENS, targets=TOKENS), loaded.read(TOKENS, targets=TOKENS)
    assert found.sites == expected.sites
    assert torch.equal(found.kl, expected.kl)
    assert torch.equal(found.target_rank, expected.target_rank)
    again = loaded.fit([TOKENS], steps=1)
    assert (again[0] < lens.fit([TOKENS], steps=1)[0] + 1e-6).all()


def test_save_leaves_the_lens_that_was_there_when_it_fails(tmp_path, monkeypatch):
    def fails(tensors, path, metadata):
        with open(path, "w") as file:
            file.write("half a l")
        raise OSError("no space")

    lens = TunedLens(Rotated(), "embed")
    lens.fit([TOKENS], steps=1)
    lens.save(tmp_path / "lens")
    before = (tmp_path / "lens").read_bytes()
    monkeypatch.setattr(tuned_lens, "save_file", fails)
    with pytest.raises(OSError, match="no space"):
        lens.save(tmp_path / "lens")
    assert (tmp_path / "lens").read_bytes() == before


def test_load_refuses_other_files_and_other_models(tmp_path):
    model = Rotated()
    (tmp_path / "text").write_text("no lens")
    for path in ("text", "absent", "."):
        with pytest.raises(InterpError, match="cannot be read"):
            TunedLens.load(tmp_path / path, model)
    save_file({"x": torch.zeros(1)}, tmp_path / "weights")
    with pytest.raises(InterpError, match="has the format None"):
        TunedLens.load(tmp_path / "weights", model)
    lens = TunedLens(model, "layers.2")
    with pytest.raises(InterpError, match="call fit first"):
        lens.save(tmp_path / "lens")
    lens.fit([TOKENS], steps=1)
    lens.save(tmp_path / "lens")
    assert set(load_file(tmp_path / "lens")) == {"0.matrix", "0.bias"}
    with pytest.raises(InterpError, match=r"layers\.2"):
        TunedLens.load(tmp_path / "lens", Rotated(num_layers=2))


def test_fit_refuses_batches_that_reach_other_sites_than_those_before():
    class Looped(Rotated):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for _ in tokens:
                x = self.layers[0](x)
            return self.head(self.norm(x))

    with pytest.raises(InterpError, match=r"'layers\.0:out#1'\]; expected \['layers\.0:out'\]"):
        TunedLens(Looped(), "layers.0").fit([TOKENS[:1], TOKENS[:2]], steps=2)


def test_tuned_lens_refuses_what_does_not_fit():
    lens = TunedLens(Rotated(), SITES)
    with pytest.raises(InterpError, match=r"'embed:out' has no translator"):
        lens.read(TOKENS)
    with pytest.raises(InterpError, match="ended after 1 of 3 steps"):
        lens.fit(iter([TOKENS]), steps=3)
    assert not any(weight.requires_grad for pair in lens.translators.values() for weight in pair)
    with pytest.raises(InterpError, match="steps is 0"):
        lens.fit([TOKENS], steps=0)
