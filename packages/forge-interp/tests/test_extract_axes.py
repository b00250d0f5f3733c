"""Which axis of a value holds the samples, and of which tokens are the rows, where there is a choice?"""

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


@pytest.mark.parametrize("tokens", ["input_ids", "decoder_input_ids"])
@pytest.mark.parametrize("lengths", [(2, 3), (3, 2)], ids=["others", "the same"])
def test_extract_leaves_the_padding_of_an_encoder_and_a_decoder_to_a_loader(tokens: str, lengths: Any):
    both = zip((3, 2), lengths, strict=True)
    samples = [{"input_ids": [1] * n, "decoder_input_ids": [2] * m} for n, m in both]
    with pytest.raises(InterpError, match=r"has shapes .* give ready batches from a DataLoader"):
        extract_representations(nn.Identity(), samples, "", tokens=tokens)
