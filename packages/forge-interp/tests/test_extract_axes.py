"""Which axis of a value holds the samples, and of which tokens are the rows, where there is a choice?"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forge_interp.errors import InterpError
from forge_interp.extraction.extract import extract_representations
from torch import Tensor, nn


class Recurrent(nn.Module):
    """Time first inside, as `nn.LSTM` and `nn.Transformer` have it by default; samples first outside."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 6)
        self.lstm = nn.LSTM(6, 6)
        self.out = nn.Identity()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(input_ids).transpose(0, 1))[0].transpose(0, 1))


def time_first(value: Tensor) -> Tensor:
    return value.transpose(0, 1)


@pytest.mark.parametrize("samples", [4, 6, 8])
def test_extract_refuses_time_first_with_as_many_tokens_as_samples(tmp_path: Path, samples: int):
    ids = torch.randint(50, (samples, 4))
    with pytest.raises(InterpError, match=r"lstm has a value \[4, [23], 6\] for [23] samples.*with select"):
        extract_representations(Recurrent(), ids, "lstm", tmp_path / "a", batch_size=4)
    found = extract_representations(Recurrent(), ids, "lstm", batch_size=4, select=time_first)
    model = Recurrent()
    rows = model(ids).detach().flatten(0, 1)
    torch.testing.assert_close(found["lstm"], rows)
    assert torch.equal(found.token_id, ids.flatten())


def test_extract_finds_one_site_with_time_first_among_others(tmp_path: Path):
    with pytest.raises(InterpError, match=r"a value \[4, 3, 6\] for 3 samples"):
        extract_representations(Recurrent(), torch.randint(50, (8, 4)), "*", tmp_path / "a", batch_size=4)


@pytest.mark.parametrize("lengths", [(4, 4, 4, 4), (4, 2, 3, 1)])
def test_extract_runs_one_sample_less_once_when_axes_are_as_long(lengths: tuple[int, ...]):
    ids = [torch.randint(1, 50, (length,)) for length in lengths * 2]
    sizes: list[int] = []
    model = Recurrent()
    model.embed.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    found = extract_representations(model, ids, "out", batch_size=4)
    assert (sizes.count(3), sizes.count(4)) == (1, 2)
    assert torch.equal(found.token_id, torch.cat(ids))


def test_extract_looks_again_when_only_a_later_batch_is_square():
    ids = [torch.randint(1, 50, (length,)) for length in (5, 5, 4, 4, 4, 4)]
    sizes: list[int] = []
    model = Recurrent()
    model.register_forward_pre_hook(lambda module, args: sizes.append(1))
    extract_representations(model, ids, "out", batch_size=2)
    assert len(sizes) == 3  # the first batch has shown it
    one_token, square = ids[0][None, :1], torch.stack(ids[2:])
    with pytest.raises(InterpError, match="lstm has a value"):
        extract_representations(model, iter([one_token, square]), "lstm")


def test_extract_asks_when_a_square_batch_cannot_be_cut(tmp_path: Path):
    class Told(Recurrent):
        def forward(self, input_ids: Tensor, scale: Tensor) -> Tensor:
            return super().forward(input_ids) * scale

    batch = {"input_ids": torch.randint(50, (4, 4)), "scale": torch.tensor(2.0)}
    with pytest.raises(
        InterpError, match=r"batch 0 has as many samples as tokens or features \(4\).*another batch_size"
    ):
        extract_representations(Told(), iter([batch]), "out", tmp_path / "a")


def ragged(longest: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (7,), generator=generator).tolist()
    return [torch.randint(2, 40, (length,), generator=generator).tolist() for length in lengths]


def make_t5() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("side", ["encoder", "decoder", "labels"])
def test_extract_pads_both_sides_of_an_encoder_decoder(side: str):
    model = make_t5()
    sources, targets = ragged(9, 1), ragged(6, 2)
    key = "labels" if side == "labels" else "decoder_input_ids"
    samples = [{"input_ids": s, key: t} for s, t in zip(sources, targets, strict=True)]
    options: dict[str, Any] = {"pool": "mean"} if side == "encoder" else {}
    if side == "decoder":
        options = {"tokens": "decoder_input_ids", "mask": "decoder_attention_mask"}
    stack = "encoder" if side == "encoder" else "decoder"
    if side == "labels":
        options = {"select": lambda value: value[:, 0]}
    found = extract_representations(model, samples, f"{stack}.block.1", batch_size=3, **options)
    expected = list(one_by_one(model, samples, stack))
    if side == "encoder":
        expected = [rows.mean(0, keepdim=True) for rows in expected]
    if side == "labels":
        expected = [rows[:1] for rows in expected]
    torch.testing.assert_close(found[f"{stack}.block.1"], torch.cat(expected), rtol=1e-4, atol=1e-5)
    if side == "decoder":
        assert found.token_id.tolist() == [token for target in targets for token in target]


def one_by_one(model: Any, samples: list[dict[str, list[int]]], stack: str) -> Iterator[Tensor]:
    """The rows of single samples, without padding."""
    rows: list[Tensor] = []
    block = getattr(model, stack).block[1]
    handle = block.register_forward_hook(lambda module, args, output: rows.append(output[0][0]))
    for sample in samples:
        with torch.no_grad():
            model(**{key: torch.tensor([ids]) for key, ids in sample.items()}, use_cache=False)
    handle.remove()
    return iter(rows)
