"""Multi-token prediction against each depth run on a sequence of its own; speculation against greedy."""

import pytest
import torch
import torch.nn.functional as F
from forge_model import DecoderConfig, LossConfig, ModelError, Sampling, generate, initialize
from forge_model.attention.cache import Cache
from forge_model.config import GroupedQueryConfig, LatentConfig, MTPConfig
from forge_model.loss.cross_entropy import LossTerms, Sum
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

ATTENTION = {
    "gqa": GroupedQueryConfig(num_heads=4, num_kv_heads=2, sliding_window=6),
    "mla": LatentConfig(num_heads=3, kv_rank=10, nope_dim=6, rope_dim=8, value_dim=5),
}
LOSS = LossConfig(chunk_tokens=5).build()


def build(depths, attention="gqa", vocab=41):
    config = DecoderConfig(
        vocab_size=vocab,
        dim=24,
        num_layers=2,
        max_tokens=64,
        init_std=0.3,
        attention=ATTENTION[attention],
        mtp=MTPConfig(num_modules=depths, loss_weight=0.7),
        embedding_scale=1.5,
    )
    model = config.build()
    initialize(model, 0)
    return model.double()


def cache_for(rows, tokens):
    return Cache(2, tokens, padding=torch.zeros(rows, dtype=torch.long))


def by_hand(model, tokens, labels):
    """The cross entropy of each depth, a sum, on sequences that end where their targets do."""
    hidden = model.hidden_states(tokens, cache_for(*tokens.shape))
    sums = [F.cross_entropy(model.head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")]
    for depth, module in enumerate(model.mtp.values(), 1):
        length = tokens.shape[1] - depth
        cache = cache_for(len(tokens), length)
        made = model.predict_ahead(
            module, tokens[:, depth:], hidden[:, :length], cache.layers[0], cache.mask(length)
        )
        hidden = made
        logits = model.head(hidden).flatten(0, 1)
        sums.append(F.cross_entropy(logits, labels[:, depth:].flatten(), reduction="sum"))
    return sums


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("depths", [1, 3])
def test_loss_is_that_of_each_depth_on_a_sequence_of_its_own(depths, attention):
    model, tokens = build(depths, attention), torch.randint(41, (2, 12))
    labels = torch.randint(41, (2, 12))
    terms = model(tokens, labels=labels, loss_fn=LOSS)
    main, *ahead = by_hand(model, tokens, labels)
    torch.testing.assert_close(terms.total, main + 0.7 / depths * sum(ahead))
    torch.testing.assert_close(terms.sums["loss"].value, main.detach())
    for depth, expected in enumerate(ahead, 1):
        value, count = terms.sums[f"mtp{depth}_loss"]
        torch.testing.assert_close(value, expected.detach())
        assert count == 2 * (12 - depth)
    terms.total.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_loss_of_masked_documents_is_that_of_documents_alone():
    model, tokens = build(2), torch.randint(41, (1, 12))
    lengths = [5, 1, 6]
    doc_ids = torch.arange(3).repeat_interleave(torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    labels[:, [4, 5]] = -100
    terms = model(tokens, labels=labels, loss_fn=LOSS, doc_ids=doc_ids, positions=positions)
    alone = [
        model(part, labels=target, loss_fn=LOSS)
        for part, target in zip(tokens.split(lengths, 1), labels.split(lengths, 1), strict=True)
    ]
    torch.testing.assert_close(terms.total, sum(one.total for one in alone))
    assert terms.sums["mtp1_loss"].count == 3 + 0 + 4


def test_logits_need_no_modules():
    model, tokens = build(1), torch.randint(41, (2, 12))
    before = model(tokens)
    for parameter in model.mtp.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    assert torch.equal(model(tokens), before)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("depths", [1, 2, 3])
@pytest.mark.parametrize("vocab", [2, 41])
@torch.no_grad()
def test_speculation_writes_what_plain_greedy_writes(depths, attention, vocab):
    model, prompts = build(depths, attention, vocab), [[1, 0, 1, 1, 0, 1], [1], [0, 0, 1]]
    plain = generate(model, prompts, 17, Sampling(temperature=0))
    calls, seen = [], []
    run = model.hidden_states
    model.hidden_states = lambda tokens, cache: calls.append(tokens.shape[1]) or run(tokens, cache)
    given = {"on_tokens": seen.append, "speculative": True}
    assert generate(model, prompts, 17, Sampling(temperature=0), **given) == plain
    assert [[step[row] for step in seen] for row in range(3)] == plain
    assert len(calls) <= 17 and max(calls[1:]) <= depths + 1
    if vocab == 2 and attention == "gqa":
        calls.clear()
        generate(model, prompts[:1], 17, Sampling(temperature=0), speculative=True)
        assert len(calls) < 17, "of two tokens, some are guessed"


def test_speculation_stops_each_prompt_at_its_own_stop_token():
    model, prompts = build(2, vocab=5), [[1, 2], [3, 4], [0]]
    plain = generate(model, prompts, 20, Sampling(temperature=0), [3])
    assert generate(model, prompts, 20, Sampling(temperature=0), [3], speculative=True) == plain


def test_speculation_is_refused_without_modules_and_with_drawn_tokens():
    with pytest.raises(ModelError, match="no modules for multi-token"):
        generate(build(0), [[1]], 2, Sampling(temperature=0), speculative=True)
    with pytest.raises(ModelError, match="which is greedy"):
        generate(build(1), [[1]], 2, speculative=True)


@pytest.mark.parametrize("documents", [False, True])
def test_stages_one_after_the_other_equal_the_model(documents):
    model, first, last = (build(2) for _ in range(3))
    first.norm = first.head = last.embed = None
    del first.layers["1"], last.layers["0"], first.mtp["0"], first.mtp["1"]
    tokens, labels = torch.randint(41, (2, 2, 12))
    batch = {"labels": labels, "loss_fn": LOSS}
    batch |= {"doc_ids": torch.arange(12).div(5, rounding_mode="floor").expand(2, -1)} if documents else {}
    assert torch.equal(
        last(tokens, hidden=first(tokens, **batch), **batch).total, model(tokens, **batch).total
    )
    del batch["labels"]
    assert torch.equal(last(tokens, hidden=first(tokens, **batch), **batch), model(tokens, **batch))
    assert first.parallel_plan()["stages"]["dim"] == first(tokens, **batch).shape[-1] == 72
    assert build(1).parallel_plan()["units"][-1] == ["mtp.0"]


def test_flops_equal_those_torch_counts():
    model, tokens = build(2).float(), torch.zeros(2, 32, dtype=torch.int64)

    def loss(hidden, weight, labels):
        total = (hidden @ weight.t()).logsumexp(-1).sum()
        return LossTerms(total, {"loss": Sum(total, total)})

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens, loss_fn=loss).total.backward()
    counted = counter.get_total_flops() / tokens.numel()
    assert model.config.flops_per_token(32, causal=False) == pytest.approx(counted, rel=1e-6)
