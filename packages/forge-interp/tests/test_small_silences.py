"""What was wrong without a word in small corners, each against the plain computation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forge_interp import InterpError, ablate, capture, edit, extract_representations, patch, steer
from forge_interp.errors import fitting
from forge_interp.extraction.run.identity import model_identity
from torch import Tensor, nn


class TimeFirst(nn.Module):
    """Scores [T, B] of ids [B, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score, self.out = nn.Embedding(9, 4), nn.Linear(4, 1), nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.score(self.embed(ids.T))[..., 0])


@pytest.mark.parametrize("size", [3, 5])
def test_extract_refuses_scores_with_time_first_also_with_as_many_tokens_as_samples(size: int):
    ids = torch.randint(9, (10, 5))
    with pytest.raises(InterpError, match=r"out has a value \[5, \d\] for \d samples"):
        extract_representations(TimeFirst(), ids, "out", batch_size=size, progress=False)


def test_extract_takes_features_as_many_as_samples():
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    rows = extract_representations(model, x, "", batch_size=4, progress=False)[""]
    assert torch.equal(rows, torch.cat([model(part) for part in x.split(4)]))


class OneHead(nn.Module):
    """Attention of one head, called with [B, T, H]."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("site", [":attn.z", ":attn.entropy"])
def test_extract_refuses_attention_without_heads_as_its_dims_are_unknown(site: str):
    model, x = OneHead(), torch.randn(6, 5, 5)
    with pytest.raises(InterpError, match=r"three dimensions.*select"):
        extract_representations(model, x, site, batch_size=3, progress=False)
    chosen = (
        {"select": lambda value: value} if site == ":attn.z" else {"select": lambda value: value[..., None]}
    )
    rows = extract_representations(model, x, site, batch_size=3, progress=False, **chosen)[site]
    if site == ":attn.z":
        assert torch.equal(rows, torch.cat([model(part) for part in x.split(3)]).flatten(0, 1))


@pytest.mark.parametrize("site", ["decoder.block.0", "lm_head", "decoder.block.*:out"])
def test_extract_gives_rows_of_a_decoder_no_ids_of_its_encoder(tmp_path: Path, site: str):
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 11, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, num_heads=2)).eval()
    ids, target = torch.randint(2, 11, (2, 4, 5)).unbind()
    data = {"input_ids": ids, "decoder_input_ids": target}
    options = {"batch_size": 2, "progress": False}
    with pytest.raises(InterpError, match=r"rows of the decoder.*input_ids.*tokens='decoder_input_ids'"):
        extract_representations(model, data, site, **options)
    names = {"tokens": "decoder_input_ids", "mask": "decoder_attention_mask"}
    store = extract_representations(model, data, site, **names, **options)
    assert torch.equal(store.token_id, target.flatten())
    with pytest.raises(InterpError, match=r"rows of the encoder.*decoder_input_ids.*tokens='input_ids'"):
        extract_representations(model, data, "encoder.block.0", **names, **options)
    store = extract_representations(model, data, "encoder.block.0", **options)
    assert torch.equal(store.token_id, ids.flatten())


def test_extract_gives_no_pool_of_a_decoder_the_mask_of_its_encoder():
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 11, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, num_heads=2)).eval()
    ids, target = torch.randint(2, 11, (4, 6)), torch.randint(2, 11, (4, 5))
    mask = torch.ones_like(target)
    mask[1, 3:] = 0
    data = {"input_ids": ids, "decoder_input_ids": target, "decoder_attention_mask": mask}

    def pool(value: Tensor, keep: Tensor) -> Tensor:
        return (value * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)

    site, options = "decoder.block.0", {"pool": pool, "batch_size": 2, "progress": False}
    with pytest.raises(InterpError, match=r"rows of the decoder.*input_ids.*tokens='decoder_input_ids'"):
        extract_representations(model, data, site, **options)
    names = {"tokens": "decoder_input_ids", "mask": "decoder_attention_mask"}
    found = extract_representations(model, data, site, **names, **options)[site]
    options["pool"] = "mean"
    expected = extract_representations(model, data, site, **names, **options)[site]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("site", [":attn.pattern", ":attn.entropy"])
def test_every_call_of_attention_is_checked(site: str):
    class Model(nn.Module):
        def forward(self, q: Tensor, scale: float) -> Tensor:
            weights = (q @ q.mT / q.shape[-1] ** 0.5).softmax(-1)
            return weights @ q if scale == 1 else (weights.mul_(scale)) @ q

    model, q = Model(), torch.randn(2, 2, 40, 4)
    with capture(model, site):
        model(q, 1)
        model(q, 1)
    with pytest.raises(InterpError, match="differs from the output"), capture(model, site):
        model(q, 1)
        model(q, 2.0)


def repeated(q: Tensor, v: Tensor, how: str, gates: Tensor) -> tuple[Tensor, Tensor]:
    k = v.repeat_interleave(2, 1)
    if how == "product":
        return k, v.repeat_interleave(2, 1) * gates
    if how == "unequal":
        return k, torch.repeat_interleave(v, torch.tensor([1, 3]), 1)
    values = (
        v.repeat_interleave(2, 1)
        if how == "in place"
        else v[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)
    )
    return k, values.mul_(gates)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("how", ["product", "in place", "in place of expanded", "unequal"])
def test_an_identity_edit_changes_nothing_where_repeated_values_were_changed(
    how: str, eager: bool, inference: bool
):
    gates = torch.arange(1.0, 5.0).view(1, 4, 1, 1)

    class Model(nn.Module):
        def forward(self, q: Tensor, v: Tensor) -> Tensor:
            k, values = repeated(q, v, how, gates)
            if eager:
                return torch.matmul((q @ k.mT / 2).softmax(-1), values)
            return F.scaled_dot_product_attention(q, k, values)

    with torch.inference_mode(inference):
        q, v = torch.randn(2, 4, 5, 4), torch.randn(2, 2, 5, 4)
        plain = Model()(q, v)
        for name in ("z", "v"):
            model = Model()
            with edit(model, {f":attn.{name}": lambda value: value.clone()}):
                torch.testing.assert_close(model(q, v), plain)


@pytest.mark.parametrize("site", ["0:out", "1:in", "1:kw.input"])
def test_an_edit_may_give_a_tensor_that_is_kept_elsewhere(site: str):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), torch.randn(3, 4)
    cached = torch.randn(3, 4)
    before = cached.clone()
    for _ in range(2):
        with edit(model, {site: lambda value: cached}):
            assert torch.equal(model(x), before.relu())
        assert torch.equal(cached, before)


def test_an_error_of_the_accelerator_is_not_one_of_the_shape():
    with pytest.raises(torch.AcceleratorError, match="illegal memory"), fitting(torch.ones(2), "steer"):
        raise torch.AcceleratorError("illegal memory access")


def test_whole_numbers_of_numpy_are_whole_numbers(tmp_path: Path):
    model, ids = nn.Embedding(9, 4), torch.randint(9, (4, 5))
    options = {"rank": np.int64(0), "world_size": np.int64(1), "progress": False}
    store = extract_representations(model, ids, "", tmp_path / "a", batch_size=np.int64(2), **options)
    assert torch.equal(store[""], model(ids).flatten(0, 1))
    for wrong in (True, 2.0, np.float32(2)):
        with pytest.raises(InterpError, match=r"batch_size is .*expected a whole number"):
            extract_representations(model, ids, "", batch_size=wrong, progress=False)
        with pytest.raises(InterpError, match=r"rank is .*expected a whole number"):
            extract_representations(model, ids, "", rank=wrong, world_size=1, progress=False)


def per_tensor(scale: float) -> Tensor:
    return torch.quantize_per_tensor(torch.full((4, 4), scale), scale, 0, torch.qint8)


def per_channel(scale: float) -> Tensor:
    scales = torch.full((4,), scale, dtype=torch.float64)
    return torch.quantize_per_channel(torch.full((4, 4), scale), scales, torch.zeros(4), 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("make", [per_tensor, per_channel])
def test_model_identity_sees_the_scale_of_quantized_weights(make: Callable[[float], Tensor]):
    def identity(scale: float) -> dict[str, Any]:
        model = nn.Module()
        model.register_buffer("weight", make(scale))
        return model_identity(model)

    assert torch.equal(make(0.5).int_repr(), make(0.25).int_repr())
    assert identity(0.5) == identity(0.5) != identity(0.25)


@pytest.mark.parametrize("change", [patch(0.0), steer(torch.ones(4)), ablate("zero"), lambda old: old * 2])
def test_edit_copies_a_value_once(monkeypatch: pytest.MonkeyPatch, change: Any):
    model, found, clone = nn.Linear(4, 4), list[Tensor](), Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda x: found.append(x) or clone(x))
    with edit(model, {"": change}):
        model(torch.ones(2, 4))
    assert len(found) == 1
