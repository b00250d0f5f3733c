from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forge_interp.errors import InterpError
from forge_interp.extraction.extract import extract_representations, finish_extraction
from forge_interp.extraction.store import ActivationStore
from forge_interp.hooks.capture import capture
from torch import Tensor, nn
from torch.nn import functional as F

SITES = ["blocks.*:out", "blocks.1.mlp:in"]

PROBES = 2
"""Passes of the first and the last batch, whose rows tell one call from another."""


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + z.transpose(1, 2).flatten(2)
        return x + self.dropout(self.mlp(x))


class Decoder(nn.Module):
    """Causal, with or without a mask; counts its forward passes and those that reach the head."""

    def __init__(self, width: int = 8, layers: int = 3, takes_mask: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 50)
        self.passes = self.heads = 0
        self.takes_mask = takes_mask

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.passes += 1
        x, mask = self.embed(input_ids), None
        if attention_mask is not None:
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            mask = causal & attention_mask.bool()[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        self.heads += 1
        return self.head(x)


class Unmasked(Decoder):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens)


def ragged(n: int = 11) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 9, (n,), generator=generator).tolist()
    return [torch.randint(1, 50, (length,), generator=generator) for length in lengths]


def one_by_one(model: nn.Module, samples: list[Tensor], sites: list[str]) -> dict[str, Tensor]:
    """The rows that a plain loop over single samples gives."""
    rows: dict[str, list[Tensor]] = {}
    model.eval()
    for sample in samples:
        with torch.no_grad(), capture(model, sites) as acts:
            model(sample[None])
        for key, value in acts.items():
            rows.setdefault(key, []).append(value[0])
    return {key: torch.cat(parts) for key, parts in rows.items()}


def files(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("name", [None, "acts"])
def test_extract_equals_a_loop_over_single_samples(tmp_path: Path, name: str | None):
    model, samples = Decoder(), ragged()
    out = None if name is None else tmp_path / name
    store = extract_representations(model, samples, SITES, out, batch_size=4)
    expected = one_by_one(model, samples, SITES)
    assert store.keys() == expected.keys()
    for key, rows in expected.items():
        torch.testing.assert_close(store[key], rows, rtol=1e-5, atol=1e-6)
    lengths = [len(sample) for sample in samples]
    assert store.sample_id.tolist() == [i for i, length in enumerate(lengths) for _ in range(length)]
    assert store.position.tolist() == [t for length in lengths for t in range(length)]
    assert torch.equal(store.token_id, torch.cat(samples))
    names = {"index.json", *(f"part-0000{i}.safetensors" for i in range(3))}
    assert {path.name for path in tmp_path.rglob("*.*")} == (names if name else set())


def test_extract_equals_a_capture_of_each_batch_bit_for_bit(tmp_path: Path):
    model = Decoder().eval()
    ids = torch.randint(50, (7, 6))
    store = extract_representations(model, ids, SITES, tmp_path / "acts", batch_size=3)
    rows: dict[str, list[Tensor]] = {}
    for batch in ids.split(3):
        with torch.no_grad(), capture(model, SITES) as acts:
            model(batch)
        for key in acts:
            rows.setdefault(key, []).append(acts[key].flatten(0, 1))
    assert all(torch.equal(store[key], torch.cat(parts)) for key, parts in rows.items())


def test_extract_stops_behind_the_last_site_from_the_second_batch_on(tmp_path: Path):
    model = Decoder()
    extract_representations(model, torch.randint(50, (12, 4)), "blocks.1:out", tmp_path / "a", batch_size=3)
    assert (model.passes, model.heads) == (4 + PROBES, 1 + PROBES)


def test_extract_stops_behind_the_last_call_of_a_module_that_is_used_twice(tmp_path: Path):
    class Looped(Decoder):
        def forward(self, input_ids: Tensor) -> Tensor:
            self.passes += 1
            x = self.blocks[0](self.blocks[0](self.embed(input_ids), None), None)
            self.heads += 1
            return self.head(x)

    model, ids = Looped().eval(), torch.randint(50, (6, 4))
    store = extract_representations(model, ids, "blocks.0", tmp_path / "a", batch_size=2)
    assert (model.passes, model.heads) == (3 + PROBES, 1 + PROBES)
    rows: dict[str, list[Tensor]] = {}
    for batch in ids.split(2):
        with torch.no_grad(), capture(model, "blocks.0") as acts:
            model(batch)
        for key, value in acts.items():
            rows.setdefault(key, []).append(value.flatten(0, 1))
    assert list(store) == list(rows) == ["blocks.0:out", "blocks.0:out#1"]
    assert all(torch.equal(store[key], torch.cat(parts)) for key, parts in rows.items())


def test_extract_keeps_the_mode_of_each_module_and_runs_without_dropout(tmp_path: Path):
    model = Decoder()
    model.train()
    model.blocks[0].eval()
    ids = torch.randint(50, (4, 4))
    first = extract_representations(model, ids, SITES, tmp_path / "a")
    second = extract_representations(model, ids, SITES, tmp_path / "b")
    assert torch.equal(first["blocks.2"], second["blocks.2"])
    assert model.training and model.blocks[1].mlp.training and not model.blocks[0].mlp.training
    assert not first["blocks.2"].requires_grad


@pytest.mark.parametrize("pool", ["mean", "last", "first", "max"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_extract_pools_the_valid_tokens(tmp_path: Path, pool: str, side: str):
    model, samples = Decoder(), ragged()
    reduce = {
        "mean": lambda rows: rows.mean(0),
        "last": lambda rows: rows[-1],
        "first": lambda rows: rows[0],
        "max": lambda rows: rows.amax(0),
    }[pool]
    dataset: Any = samples
    if side == "left":
        dataset = [
            {
                "input_ids": F.pad(s, (9 - len(s), 0)),
                "attention_mask": F.pad(torch.ones_like(s), (9 - len(s), 0)),
            }
            for s in samples
        ]
    store = extract_representations(model, dataset, SITES, tmp_path / "a", batch_size=4, pool=pool)
    for key in store:
        expected = torch.stack([reduce(one_by_one(model, [sample], SITES)[key]) for sample in samples])
        torch.testing.assert_close(store[key], expected, rtol=1e-5, atol=1e-6)
    assert store.sample_id.tolist() == list(range(11))
    assert set(store.position.tolist()) == set(store.token_id.tolist()) == {-1}


def test_extract_leaves_out_padding_on_the_left(tmp_path: Path):
    model, samples = Decoder(), ragged()
    padded = {
        "input_ids": torch.stack([F.pad(s, (9 - len(s), 0)) for s in samples]),
        "attention_mask": torch.stack([F.pad(torch.ones_like(s), (9 - len(s), 0)) for s in samples]),
    }
    left = extract_representations(model, padded, SITES, tmp_path / "left")
    right = extract_representations(model, samples, SITES, tmp_path / "right")
    for key in left:
        torch.testing.assert_close(left[key], right[key], rtol=1e-5, atol=1e-6)
    assert torch.equal(left.token_id, right.token_id)
    assert torch.equal(left.position, right.position)


def test_extract_pools_with_a_callable(tmp_path: Path):
    model, samples = Decoder(), ragged()

    def std(value: Tensor, keep: Tensor) -> Tensor:
        return torch.stack([v[k].std(0, correction=0) for v, k in zip(value, keep, strict=True)])

    store = extract_representations(model, samples, "blocks.1", tmp_path / "a", pool=std)
    expected = [one_by_one(model, [s], ["blocks.1"])["blocks.1:out"].std(0, correction=0) for s in samples]
    torch.testing.assert_close(store["blocks.1"], torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_extract_selects_by_pattern(tmp_path: Path):
    ids = torch.randint(50, (5, 4))
    select = {"blocks.0:out": lambda value: value[..., :2]}
    store = extract_representations(
        Decoder(), ids, ["blocks.0:out", "blocks.1:out"], tmp_path / "a", select=select
    )
    assert (store["blocks.0"].shape, store["blocks.1"].shape) == ((20, 2), (20, 8))
    with pytest.raises(InterpError, match=r"select is given for \['x'\]"):
        extract_representations(
            Decoder(), ids, "blocks.0", tmp_path / "b", select={"x": select["blocks.0:out"]}
        )


def test_extract_puts_the_tokens_of_attention_first(tmp_path: Path):
    model = Decoder().eval()
    ids = torch.randint(50, (5, 4))
    sites = ["blocks.0:attn.z", "blocks.0:attn.pattern", "blocks.0:attn.entropy"]
    store = extract_representations(model, ids, sites, tmp_path / "a")
    with torch.no_grad(), capture(model, sites) as acts:
        model(ids)
    assert torch.equal(store[sites[0]], acts[sites[0]].transpose(1, 2).flatten(0, 1))
    assert torch.equal(store[sites[1]].view(5, 4, 2, 4), acts[sites[1]].transpose(1, 2))
    assert store[sites[2]].shape == (20, 2)


@pytest.mark.parametrize("name", [None, "acts"])
def test_extract_keeps_bfloat16_bit_for_bit(tmp_path: Path, name: str | None):
    model = Decoder().bfloat16().eval()
    ids = torch.randint(50, (4, 5))
    store = extract_representations(model, ids, "blocks.2", name and tmp_path / name)
    with torch.no_grad(), capture(model, "blocks.2") as acts:
        model(ids)
    assert store["blocks.2"].dtype == torch.bfloat16
    assert torch.equal(store["blocks.2"], acts["blocks.2"].flatten(0, 1))


def test_extract_casts_rows(tmp_path: Path):
    store = extract_representations(
        Decoder(), torch.randint(50, (4, 5)), SITES, tmp_path / "a", dtype=torch.float16
    )
    assert {store[key].dtype for key in store} == {torch.float16}


def test_extract_reads_batches_of_a_loader_like_the_samples(tmp_path: Path):
    samples = ragged()
    ids = torch.randint(1, 50, (10, 6))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=4)
    first = extract_representations(Decoder(), loader, SITES, tmp_path / "a")
    second = extract_representations(Decoder(), ids, SITES, tmp_path / "b", batch_size=4)
    rows = [{"input_ids": sample.tolist(), "text": "words", "label": 3} for sample in samples]
    third = extract_representations(Decoder(), rows, SITES, tmp_path / "c", batch_size=4)
    fourth = extract_representations(Decoder(), samples, SITES, tmp_path / "d", batch_size=4)
    for key in first:
        assert torch.equal(first[key], second[key])
        assert torch.equal(third[key], fourth[key])
    assert torch.equal(first.sample_id, second.sample_id)


def test_extract_gives_one_row_a_sample_for_images(tmp_path: Path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)).eval()
    images = torch.randn(7, 3, 8, 8)
    store = extract_representations(model, images, ["1:out", "2"], tmp_path / "a", batch_size=3)
    torch.testing.assert_close(store["2"], model(images).detach())
    assert store["1"].shape == (7, 144)
    with pytest.raises(InterpError, match=r"0:out has a value \[3, 4, 6, 6\].*flatten\(2\)"):
        extract_representations(model, images, "0:out", tmp_path / "b", batch_size=3)
    assert not list(tmp_path.glob("b*"))
    places = extract_representations(
        model,
        [{"pixel_values": image} for image in images],
        "0",
        tmp_path / "c",
        select=lambda v: v.flatten(2).mT,
    )
    assert places["0"].shape == (7 * 36, 4)
    assert places.position[:37].tolist() == [*range(36), 0]
    assert set(places.token_id.tolist()) == {-1}


def test_extract_refuses_sites_with_other_rows(tmp_path: Path):
    model, ids = Decoder(), torch.randint(50, (3, 4))
    pooled = {"blocks.1": lambda value: value.mean(1)}
    with pytest.raises(
        InterpError, match=r"blocks.1 has rows of samples \[3\], blocks.0 of tokens \[3, 4\].*two calls"
    ):
        extract_representations(model, ids, ["blocks.0", "blocks.1"], tmp_path / "a", select=pooled)


def test_extract_refuses_rows_whose_shape_changes(tmp_path: Path):
    samples = [torch.randint(50, (length,)) for length in (4, 4, 5, 5)]
    with pytest.raises(InterpError, match=r"attn.pattern \[2, 5\].*\[2, 4\].*select"):
        extract_representations(Decoder(), samples, "blocks.0:attn.pattern", tmp_path / "a", batch_size=2)


@pytest.mark.parametrize("name", ["acts.npz", "acts.npy"])
def test_extract_says_how_other_formats_are_made(tmp_path: Path, name: str):
    with pytest.raises(InterpError, match=r"expected a folder: extract to 'acts', and call \.export\("):
        extract_representations(Decoder(), torch.randint(50, (3, 4)), SITES, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_extract_passes_no_mask_to_a_causal_model_without_one(tmp_path: Path):
    samples = ragged()
    store = extract_representations(Unmasked(), samples, "blocks.2", tmp_path / "a", batch_size=4)
    expected = one_by_one(Unmasked(), samples, ["blocks.2"])["blocks.2:out"]
    torch.testing.assert_close(store["blocks.2"], expected, rtol=1e-5, atol=1e-6)


def test_extract_refuses_padding_that_changes_the_rows(tmp_path: Path):
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            return x + x.mean(1, keepdim=True)

    model = nn.Sequential(Mixing())
    with pytest.raises(InterpError, match=r"sample \d+ has at 0:out other rows alone"):
        extract_representations(model, ragged(), "0", tmp_path / "a", batch_size=4)
    extract_representations(model, ragged(), "0", tmp_path / "a", batch_size=1)


def test_extract_calls_forward_instead(tmp_path: Path):
    model, ids = Decoder(), torch.randint(50, (5, 4))

    def twice(model: nn.Module, batch: Tensor) -> None:
        model(batch)
        model(batch.flip(1))

    store = extract_representations(model, ids, "blocks.1", tmp_path / "a", forward=twice, batch_size=2)
    assert store.sites == ("blocks.1:out", "blocks.1:out#1")
    flipped = extract_representations(model, ids.flip(1), "blocks.1", tmp_path / "b", batch_size=2)
    assert torch.equal(store["blocks.1#1"], flipped["blocks.1"])


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_extract_gives_equal_bytes_for_every_number_of_processes(tmp_path: Path, world_size: int):
    samples = ragged(13)
    extract_representations(Decoder(), samples, SITES, tmp_path / "one", batch_size=2)
    for rank in reversed(range(world_size)):
        store = extract_representations(
            Decoder(), samples, SITES, tmp_path / "all", batch_size=2, rank=rank, world_size=world_size
        )
        if rank > (world_size == 8):  # seven parts: the first of eight has nothing to do
            with pytest.raises(InterpError, match=r"waits for parts 0"):
                _ = store.rows
    assert files(tmp_path / "all") == files(tmp_path / "one")


def test_extract_gives_equal_bytes_when_batches_share_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    samples = ragged(13)
    extract_representations(Decoder(), samples, SITES, tmp_path / "each", batch_size=2)
    monkeypatch.setattr("forge_interp.extraction.samples._MOST_PARTS", 3)
    one = extract_representations(Decoder(), samples, SITES, tmp_path / "one", batch_size=2)
    for rank in (1, 0):
        call = {"rank": rank, "world_size": 2, "batch_size": 2}
        extract_representations(Decoder(), samples, SITES, tmp_path / "all", **call)
    assert files(tmp_path / "all") == files(tmp_path / "one")
    assert len(files(tmp_path / "one")) == 1 + 3 and len(files(tmp_path / "each")) == 1 + 7
    each = ActivationStore.open(tmp_path / "each")
    assert all(torch.equal(one[site], each[site]) for site in each)
    (tmp_path / "one" / "part-00001.safetensors").unlink()
    model = Decoder()
    extract_representations(model, samples, SITES, tmp_path / "one", batch_size=2)
    assert model.passes == 3 + 3 + PROBES and files(tmp_path / "all") == files(tmp_path / "one")


def test_extract_gives_equal_bytes_when_processes_share_an_iterable(tmp_path: Path):
    loader = torch.utils.data.DataLoader(torch.randint(50, (10, 6)), batch_size=3)
    extract_representations(Decoder(), loader, SITES, tmp_path / "one")
    for rank in range(2):
        extract_representations(Decoder(), loader, SITES, tmp_path / "all", rank=rank, world_size=2)
    assert files(tmp_path / "all") == files(tmp_path / "one")
    with pytest.raises(InterpError, match="iterable without a length, for 2 processes"):
        extract_representations(Decoder(), (b for b in loader), SITES, tmp_path / "b", rank=0, world_size=2)


def test_extract_goes_on_with_another_number_of_processes(tmp_path: Path):
    extract_representations(Decoder(), ragged(), SITES, tmp_path / "one", batch_size=2)
    call = {"sites": SITES, "out": tmp_path / "all", "batch_size": 2}
    extract_representations(Decoder(), ragged(), **call, rank=0, world_size=3)
    model = Decoder()
    extract_representations(model, ragged(), **call)
    assert model.passes == 4 + 2 + PROBES and files(tmp_path / "all") == files(tmp_path / "one")


def test_extract_returns_what_is_there_when_asked_again(tmp_path: Path):
    model = Decoder()
    extract_representations(model, ragged(), SITES, tmp_path / "a")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    passes = model.passes
    with pytest.warns(
        UserWarning, match="was there, made by the same call.* nothing ran again but the first"
    ):
        store = extract_representations(model, ragged(), SITES, tmp_path / "a")
    assert model.passes == passes + PROBES
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()} == before
    assert store.rows == sum(map(len, ragged()))


def test_extract_writes_anew_when_told_not_to_resume(tmp_path: Path):
    call = {"sites": SITES, "out": tmp_path / "a", "batch_size": 2}
    extract_representations(Decoder(), ragged(), **call, pool="mean")
    for rank in (1, 0):  # each removes what is of no use to it
        share = {"rank": rank, "world_size": 2, "resume": False}
        extract_representations(Decoder(), ragged(), **call, **share)
    model = Decoder()
    again = extract_representations(model, ragged(), **call, resume=False)
    assert model.passes == 6 + 3 + PROBES and again.rows == sum(map(len, ragged()))
    assert (tmp_path / "a" / "index.json").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch_size": 4}, "batch_size: 8 there, 4 asked"),
        ({"pool": "mean"}, 'pool: null there, "mean" asked'),
        ({"pool": lambda value, mask: value[:, 0]}, 'pool: null there, "<lambda>"'),
        ({"select": torch.tanh}, "select: null there, .*tanh.* asked"),
        ({"forward": lambda model, batch: model(**batch)}, 'forward: null there, "<lambda>"'),
        ({"dtype": torch.float16}, 'dtype: null there, "float16" asked'),
        ({"pad_id": 3}, "names: "),
        ({"mask": None}, "names: "),
        ({"sites": "head"}, "sites: .* there, .* asked"),
        ({"dataset": ragged(12)}, "dataset crc: "),
        ({"model": Decoder(width=4)}, "model layout: "),
        ({"model": nn.Sequential(Decoder())[0].double()}, "model layout: .*weights: "),
    ],
)
def test_extract_lists_how_an_output_differs(tmp_path: Path, change: dict[str, Any], text: str):
    call = {"model": Decoder(), "dataset": ragged(), "sites": "blocks.*:out", "out": tmp_path / "a"}
    extract_representations(**call)
    with pytest.raises(InterpError, match=f"made by another extraction.*{text}.*resume=False"):
        extract_representations(**(call | change))


def test_extract_takes_an_output_of_another_torch_but_goes_on_with_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole, half = (tmp_path / "whole", tmp_path / "half")
    extract_representations(Decoder(), ragged(), SITES, whole)
    extract_representations(Decoder(), ragged(40), SITES, half, rank=0, world_size=2)
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    with pytest.warns(UserWarning, match="was there"):
        assert extract_representations(Decoder(), ragged(), SITES, whole).rows == sum(map(len, ragged()))
    with pytest.raises(InterpError, match=r"versions torch: .*9\.9"):
        extract_representations(Decoder(), ragged(40), SITES, half, rank=0, world_size=2)


def test_extract_notices_other_weights(tmp_path: Path):
    model = Decoder()
    extract_representations(model, ragged(), SITES, tmp_path / "a")
    with torch.no_grad():
        model.blocks[0].qkv.weight[3, 5] *= 1.5
    with pytest.raises(InterpError, match="model weights: "):
        extract_representations(model, ragged(), SITES, tmp_path / "a")


class Interrupted(Exception):
    pass


class Failing:
    """Samples, of which one cannot be read after the others were asked for so many times."""

    def __init__(self, samples: list[Tensor], index: int):
        self.samples, self.index, self.asked = samples, index, 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        self.asked += 1
        if index == self.index and self.asked > len(self.samples):
            raise Interrupted
        return self.samples[index]


def test_extract_goes_on_after_an_interruption(tmp_path: Path):
    ids = [sample for sample in torch.randint(50, (40, 5))]
    extract_representations(Decoder(), ids, SITES, tmp_path / "whole", batch_size=3)
    with pytest.raises(Interrupted):
        extract_representations(Decoder(), Failing(ids, 16), SITES, tmp_path / "cut", batch_size=3)
    with pytest.raises(InterpError, match=r"waits for parts 5, 6.*run the extraction again"):
        ActivationStore.open(tmp_path / "cut")
    model = Decoder()
    extract_representations(model, ids, SITES, tmp_path / "cut", batch_size=3)
    assert (model.passes, model.heads) == (14 - 5 + PROBES, PROBES)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_extract_notices_a_loader_that_shuffles_when_it_goes_on(tmp_path: Path):
    ids = torch.randint(50, (12, 5))

    def batches(order: list[int], until: int):
        yield from ids[order].split(3)[:until]
        if until < 4:
            raise Interrupted

    order = list(range(12))
    with pytest.raises(Interrupted):
        extract_representations(Decoder(), batches(order, 2), SITES, tmp_path / "a")
    with pytest.raises(InterpError, match=r"made by another extraction \(dataset crc: "):
        extract_representations(Decoder(), batches(order[::-1], 4), SITES, tmp_path / "a")
    later = [0, 1, 2, 5, 4, 3, *range(6, 12)]
    with pytest.raises(InterpError, match=r"batch 1 is not the one.*do not shuffle"):
        extract_representations(Decoder(), batches(later, 4), SITES, tmp_path / "a")
    with pytest.raises(InterpError, match=r"batch 1 is not the one"):
        extract_representations(Decoder(), iter([ids[:3]]), SITES, tmp_path / "a")
    store = extract_representations(Decoder(), batches(order, 4), SITES, tmp_path / "a")
    assert torch.equal(store.token_id, ids.flatten())


def test_extract_notices_more_and_fewer_batches_than_there_were(tmp_path: Path):
    batches = list(torch.randint(50, (12, 5)).split(3))

    def forward(model: nn.Module, batch: Tensor) -> None:
        model(batch)

    call = {"sites": SITES, "out": tmp_path / "a", "forward": forward}
    extract_representations(Decoder(), iter(batches[:3]), **call)
    for others, number in ((batches, 3), (batches[:2], 2)):
        with pytest.raises(InterpError, match=f"batch {number} is not the one"):
            extract_representations(Decoder(), iter(others), **call)
    model = Decoder()
    with pytest.warns(UserWarning, match="was there"):
        assert extract_representations(model, iter(batches[:3]), **call).rows == 45
    assert model.passes == 1  # the first batch; the last of an iterator is not at hand


def test_extract_tries_padding_only_where_there_are_ids(tmp_path: Path):
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, inputs_embeds: Tensor) -> Tensor:
            return self.layer(inputs_embeds)

    embeds, mask = torch.randn(3, 5, 4), torch.ones(3, 5)
    mask[1, 2:] = 0
    store = extract_representations(
        model := Embedded(),
        {"inputs_embeds": embeds, "attention_mask": mask},
        "layer",
        tmp_path / "a",
    )
    assert torch.equal(store["layer"], model(embeds)[mask.bool()].detach())
    assert store.sample_id.tolist() == [0] * 5 + [1] * 2 + [2] * 5


@pytest.mark.parametrize("is_terminal", [True, False])
def test_extract_draws_on_a_terminal_only(
    tmp_path: Path, is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("tqdm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    extract_representations(Decoder(), ragged(), SITES, tmp_path / "a", batch_size=3)
    extract_representations(Decoder(), ragged(), SITES, tmp_path / "b", batch_size=3, progress=False)
    drawn = capsys.readouterr().err
    assert drawn.count("extract: ") == drawn.count("\r")
    assert drawn.count("\n") == is_terminal
    assert ("4/4" in drawn) == is_terminal


def test_finish_extraction_waits_for_all(tmp_path: Path):
    call = {"sites": SITES, "out": tmp_path / "a", "batch_size": 2, "world_size": 3}
    for rank in (2, 0):
        extract_representations(Decoder(), ragged(), **call, rank=rank)
    with pytest.raises(InterpError, match=r"waits for parts 2, 3;"):
        finish_extraction(tmp_path / "a")
    extract_representations(Decoder(), ragged(), **call, rank=1)
    (tmp_path / "a" / "index.json").unlink()  # as if it had been killed just before
    assert finish_extraction(tmp_path / "a").rows == sum(map(len, ragged()))


def test_extract_says_what_was_captured_nowhere(tmp_path: Path):
    ids = torch.randint(50, (12, 5))

    class Idle(Decoder):
        def __init__(self):
            super().__init__()
            self.idle = nn.Linear(1, 1)

    model = Idle()
    for forward in (None, lambda model, batch: model(batch)):
        with pytest.raises(InterpError, match="captured nothing at 'idle'"):
            extract_representations(model, ids, "idle", tmp_path / "a", forward=forward, batch_size=2)
        assert not list(tmp_path.iterdir())
    assert model.passes == 2 * PROBES
    seen: list[int] = []

    def skips(model: nn.Module, batch: Tensor) -> None:
        seen.append(1)
        if len(seen) < 3 + PROBES:
            model(batch)

    with pytest.raises(InterpError, match=r"batch 2 captured nothing else, those before .*blocks.1:out"):
        extract_representations(
            model, ids, "blocks.1", tmp_path / "a", forward=skips, batch_size=2, pool="mean"
        )


@pytest.mark.parametrize("out", ["acts", None])
def test_extract_keeps_what_inputs_say_of_each_row(tmp_path: Path, out: str | None):
    model, draw = Decoder(), torch.Generator().manual_seed(3)
    samples = []
    for length in (3, 5, 4, 2, 6):
        ids = torch.randint(50, (length,), generator=draw)
        samples.append({"input_ids": ids, "kind": ids % 3, "speaker": torch.tensor(length)})
    folder = None if out is None else tmp_path / out
    keep = ("kind", "speaker")
    store = extract_representations(model, samples, ["blocks.*"], folder, batch_size=2, keep=keep)
    assert store.kept("kind").tolist() == [n for sample in samples for n in sample["kind"].tolist()]
    assert store.kept("speaker").tolist() == [len(s["kind"]) for s in samples for _ in s["kind"]]
    assert list(store) == list(store.sites) and "kind" not in store
    store.export(tmp_path / "acts.npz")
    with np.load(tmp_path / "acts.npz") as arrays:
        assert np.array_equal(arrays["kind"], store.kept("kind").numpy())
    of_samples = extract_representations(model, samples, ["blocks.*"], pool="mean", keep="speaker")
    assert of_samples.kept("speaker").tolist() == [3, 5, 4, 2, 6]
    with pytest.raises(InterpError, match=r"'other' was not kept; expected one of kind, speaker"):
        store.kept("other")
    with pytest.raises(InterpError, match=r"keep names 'other', which is NoneType"):
        extract_representations(model, samples, ["blocks.*"], keep=["other"])
    if folder is not None:
        with pytest.raises(InterpError, match="keep"):
            extract_representations(model, samples, ["blocks.*"], folder, batch_size=2)
