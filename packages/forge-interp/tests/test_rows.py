from typing import Any

import pytest
import torch
from forge_interp import InterpError, extract_representations, record
from forge_interp.extraction.run.rows import RowMaker, pool_tokens
from forge_interp.extraction.samples import Batch, Names
from torch import Tensor, nn

LEFT = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]).bool()
RIGHT = LEFT.flip(1)
VALUE = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))


def make(
    inputs: Any, pool: Any = None, dtype: torch.dtype | None = None, names: Names | None = None
) -> RowMaker:
    maker = RowMaker({}, pool, dtype)
    maker.start(Batch.of(inputs, names or Names(), 2, 10))
    return maker


def ids_of(mask: Tensor) -> dict[str, Tensor]:
    return {"input_ids": torch.arange(12).view(3, 4) + 100, "attention_mask": mask.long()}


@pytest.mark.parametrize("mask", [LEFT, RIGHT])
def test_rows_are_the_valid_tokens_in_order(mask: Tensor):
    maker = make(ids_of(mask))
    expected = [VALUE[b, t] for b in range(3) for t in range(4) if mask[b, t]]
    assert torch.equal(maker.rows("x", VALUE), torch.stack(expected))
    ids = maker.ids()
    assert ids["sample_id"].tolist() == [10 + b for b in range(3) for t in range(4) if mask[b, t]]
    assert ids["token_id"].tolist() == [100 + 4 * b + t for b in range(3) for t in range(4) if mask[b, t]]
    assert ids["position"].tolist() == [t for b in range(3) for t in range(int(mask[b].sum()))]


@pytest.mark.parametrize("mask", [LEFT, RIGHT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("how", ["mean", "max", "first", "last"])
def test_pool_tokens_equals_a_loop(mask: Tensor, dtype: torch.dtype, how: str):
    value = (VALUE * 9 - 20).to(dtype)
    reduce = {
        "mean": lambda v: v.double().mean(0),
        "max": lambda v: v.amax(0),
        "first": lambda v: v[0],
        "last": lambda v: v[-1],
    }[how]
    found = pool_tokens(value, mask, how)
    expected = torch.stack([reduce(v[m]) for v, m in zip(value, mask, strict=True)])
    assert found.dtype == (torch.float32 if how == "mean" and dtype == torch.int64 else dtype)
    tolerance = 1e-14 if dtype == torch.float64 else 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("how", ["mean", "max"])
def test_pool_tokens_reads_nothing_from_padding(how: str):
    value = VALUE.clone()
    value[~RIGHT] = torch.nan
    assert torch.equal(pool_tokens(value, RIGHT, how), pool_tokens(VALUE, RIGHT, how))


def test_pool_tokens_takes_the_mean_of_bfloat16_in_float32():
    value = torch.randn(2, 100, 500).bfloat16()
    keep = torch.ones(2, 100).bool()
    assert torch.equal(pool_tokens(value, keep, "mean"), value.float().mean(1).bfloat16())
    assert (pool_tokens(torch.full((2, 100, 3), 1000.0).half(), keep, "mean") == 1000).all()


def test_rows_of_places_follow_the_mask_without_ids():
    inputs = {"inputs_embeds": VALUE, "attention_mask": RIGHT.long()}
    maker = make(inputs)
    assert torch.equal(maker.rows("x", VALUE), VALUE[RIGHT])
    assert maker.ids()["position"].tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2]
    assert set(maker.ids()["token_id"].tolist()) == {-1}
    assert torch.equal(make(inputs, "mean").rows("x", VALUE), pool_tokens(VALUE, RIGHT, "mean"))
    with pytest.raises(InterpError, match=r"\[3, 2, 5\] for a mask \[3, 4\].*tokens=None"):
        make(inputs).rows("x", VALUE[:, :2])
    assert make(inputs, names=Names(tokens=None)).rows("x", VALUE[:, :2]).shape == (6, 5)


def test_rows_give_a_callable_the_mask():
    seen: list[Tensor] = []

    def pool(value: Tensor, mask: Tensor) -> Tensor:
        seen.append(mask)
        return value.sum(1) if value.ndim == 3 else value

    maker = make(ids_of(LEFT), pool)
    assert torch.equal(maker.rows("x", VALUE), VALUE.sum(1))
    assert torch.equal(maker.rows("patches", VALUE[:, :2]), VALUE[:, :2].sum(1))
    assert torch.equal(maker.rows("single", VALUE[:, 0, 0]), VALUE[:, 0, 0])
    assert torch.equal(seen[0], LEFT)
    assert seen[1].shape == (3, 2) and seen[1].all() and seen[2].tolist() == [True] * 3
    assert maker.ids()["sample_id"].tolist() == [10, 11, 12]


@pytest.mark.parametrize("gives", [lambda v, m: v.sum(), lambda v, m: v[:2, 0], lambda v, m: 3])
def test_rows_refuse_what_a_callable_gives_for_other_samples(gives: Any):
    with pytest.raises(InterpError, match=r"pool gave .* for x; expected \[3 samples, ...\]"):
        make(ids_of(LEFT), gives).rows("x", VALUE)


def test_rows_refuse_values_that_are_not_of_the_tokens():
    maker = make(ids_of(LEFT))
    with pytest.raises(InterpError, match=r"a value \[3, 5, 4\] for tokens \[3, 4\]"):
        maker.rows("x", VALUE.mT)
    with pytest.raises(InterpError, match=r"a value \[4, 3, 5\] for 3 samples"):
        maker.rows("x", VALUE.transpose(0, 1))
    with pytest.raises(InterpError, match=r"a value \[\] for 3 samples"):
        maker.rows("x", VALUE.sum())
    with pytest.raises(InterpError, match="sample 11 has no valid token"):
        make(ids_of(RIGHT & torch.tensor([[1], [0], [1]]).bool()), "max").rows("x", VALUE)
    with pytest.raises(InterpError, match="pool is 'median'"):
        RowMaker({}, "median", None)


def test_rows_refuse_numbers_that_a_narrow_dtype_cannot_hold():
    large = VALUE.clone()
    large[1, 2, 3] = 1e5
    with pytest.raises(InterpError, match=r"x has 1e\+05, which torch.float16 cannot hold.*bfloat16"):
        make(ids_of(RIGHT), dtype=torch.float16).rows("x", large)
    large[2, 3] = 1e5  # padding does not count
    large[1, 2, 3] = torch.inf  # nor does what was so before
    rows = make(ids_of(RIGHT), dtype=torch.float16).rows("x", large)
    assert torch.equal(rows, large[RIGHT].half())
    assert make(ids_of(RIGHT), dtype=torch.bfloat16).rows("x", large * 1e9).dtype == torch.bfloat16


def test_rows_of_attention_come_by_token():
    value = torch.randn(3, 2, 4, 5)
    maker = make(ids_of(RIGHT))
    assert torch.equal(maker.rows("a:attn.z", value), value.transpose(1, 2)[RIGHT])
    chosen = RowMaker({"a:attn.z": lambda v: v[:, 0]}, None, None)
    chosen.start(Batch.of(ids_of(RIGHT), Names(), 0, 0))
    assert torch.equal(chosen.rows("a:attn.z", value), value[:, 0][RIGHT])


@pytest.mark.filterwarnings("ignore:.*nested tensor", "ignore:.*enable_nested_tensor")
def test_nested_values_of_torchs_own_encoder_are_refused_with_remedies_that_work():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x, padding = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]
    data = {"src": x, "src_key_padding_mask": padding}
    options = {"batch_size": 3, "tokens": None, "progress": False}
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
    with pytest.raises(InterpError, match="enable_nested_tensor=False"):
        extract_representations(encoder, data, ["layers.1"], **options)
    assert "nested" in str(record(encoder, {"src": x, "src_key_padding_mask": padding}))
    pad = {"layers.1": lambda value: value.to_padded_tensor(0.0)}
    found = extract_representations(encoder, data, ["layers.1"], select=pad, **options)["layers.1"]
    torch.testing.assert_close(found, expected.flatten(0, 1), rtol=0, atol=1e-6)
