"""Is the row of a padded sample that of the sample alone? Each model here mixes padding into its rows."""

from typing import Any

import pytest
import torch
from forge_interp.errors import InterpError
from forge_interp.extraction.extract import extract_representations
from torch import Tensor, nn


class Mixer(nn.Module):
    """Embeds, mixes positions in some way and takes a mask that it does not use."""

    def __init__(self, mixing: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 8)
        self.gru = nn.GRU(8, 4, batch_first=True, bidirectional=True)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.out = nn.Identity()
        self.mixing = mixing

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        x = self.embed(input_ids)
        mixed = {
            "none": lambda: x,
            "bidirectional": lambda: self.gru(x)[0],
            "fourier": lambda: torch.fft.fft2(x).real,
            "next token": lambda: self.conv(x.mT).mT,
            "length": lambda: x * (1 + x.shape[1] / 100),
            "mask": lambda: x + (x * kwargs["attention_mask"][..., None]).sum(1, keepdim=True),
        }
        return self.out(mixed[self.mixing]())


class WithoutMask(Mixer):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


def ragged(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 50, (length,), generator=generator) for length in lengths]


MIXING = ["bidirectional", "fourier", "next token", "length"]


@pytest.mark.parametrize("mixing", MIXING)
@pytest.mark.parametrize("kind", [Mixer, WithoutMask])
@pytest.mark.parametrize("pool", [None, "mean", "last"])
def test_extract_refuses_rows_that_depend_on_padding(mixing: str, kind: type[Mixer], pool: str | None):
    with pytest.raises(InterpError, match=r"sample 0 has .*other rows alone than beside longer samples"):
        extract_representations(kind(mixing), ragged(101, 120), "out", pool=pool, batch_size=2)


@pytest.mark.parametrize("mixing", MIXING)
def test_extract_refuses_them_of_a_forward_that_is_given_too(mixing: str):
    def forward(model: nn.Module, batch: Any) -> Any:
        return model(batch["input_ids"])

    with pytest.raises(InterpError, match="other rows alone"):
        extract_representations(WithoutMask(mixing), ragged(101, 120), "out", forward=forward, batch_size=2)


def test_extract_refuses_them_where_only_later_batches_are_padded():
    samples = ragged(*[5] * 20, 5, 9)
    with pytest.raises(InterpError, match="other rows alone"):
        extract_representations(Mixer("next token"), samples, "out", batch_size=2)


@pytest.mark.parametrize("mixing", ["none", "mask"])
def test_extract_takes_rows_that_do_not(mixing: str):
    samples = ragged(101, 120, 3, 7)
    found = extract_representations(Mixer(mixing), samples, "out", batch_size=2)
    model = Mixer(mixing)
    expected = [model(ids[None], attention_mask=torch.ones(1, len(ids)))[0].detach() for ids in samples]
    torch.testing.assert_close(found["out"], torch.cat(expected))


def test_extract_compares_samples_padded_on_the_left():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    batch = {"input_ids": torch.arange(10).view(2, 5) * mask, "attention_mask": mask}
    with pytest.raises(InterpError, match="other rows alone"):
        extract_representations(Mixer("next token"), iter([batch]), "out")
    assert len(extract_representations(Mixer("mask"), iter([batch]), "out")["out"]) == 8


def test_extract_compares_later_batches_less_and_less_often():
    sizes: list[int] = []
    model = Mixer("none")
    model.embed.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    extract_representations(model, ragged(*[4, 6, 7] * 32), "out", batch_size=3)
    assert sizes.count(3) == 32 and sizes.count(1) == 6  # ahead of batches 0, 1, 2, 4, 8, 16


def test_extract_leaves_samples_without_tokens_out():
    with pytest.raises(InterpError, match="sample 2 has"):
        extract_representations(Mixer("next token"), ragged(40, 0, 20), "out", batch_size=3)
    extract_representations(Mixer("next token"), ragged(40, 0), "out", batch_size=2)


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extract_finds_a_mean_over_padding_beside_a_large_feature(offset: float, dtype: torch.dtype):
    class Mean(WithoutMask):
        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            return self.out(x + x.mean(1, keepdim=True))

    model = Mean("none")
    with torch.no_grad():
        model.embed.weight[:, 3] += offset
    with pytest.raises(InterpError, match="other rows alone"):
        extract_representations(model.to(dtype), ragged(40, 20, 39), "out", batch_size=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extract_allows_rounding(dtype: torch.dtype):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    stack = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.stack, self.out = nn.Embedding(50, 32), stack, nn.Identity()

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.out(self.stack(self.embed(input_ids), src_key_padding_mask=attention_mask == 0))

    samples = ragged(*range(3, 60, 2))
    found = extract_representations(Model().to(dtype), samples, "out", batch_size=8)
    assert len(found["out"]) == sum(map(len, samples))


class Pair(nn.Module):
    """A decoder that is told about the sum of what its encoder reads, and masks its own padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(50, 8), nn.Identity()

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, decoder_attention_mask: Tensor) -> Tensor:
        own = self.embed(decoder_input_ids)
        told = (own * decoder_attention_mask[..., None]).sum(1, keepdim=True)
        return self.out(own + told + self.embed(input_ids).sum(1, keepdim=True))


def test_extract_does_not_trim_an_encoder_by_the_mask_of_its_decoder():
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    batch = {
        "input_ids": torch.arange(20, 30).view(2, 5),
        "decoder_input_ids": torch.arange(10).view(2, 5) * mask,
        "decoder_attention_mask": mask,
    }
    names = {"tokens": "decoder_input_ids", "mask": "decoder_attention_mask"}
    found = extract_representations(Pair(), iter([batch]), "out", **names)["out"]
    torch.testing.assert_close(found, Pair()(**batch)[mask.bool()].detach())
