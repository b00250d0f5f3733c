"""What is an output of the same call, and what of another one? Each change here changes rows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forge_interp.errors import InterpError
from forge_interp.extraction.extract import extract_representations
from forge_interp.extraction.run.identity import is_distributed, model_identity
from forge_interp.hooks.edit import edit, steer
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

IDS = torch.randint(9, (8, 5), generator=torch.Generator().manual_seed(0))
FACTOR: Any = 1.0


class Adapter(nn.Module):
    """A linear layer with a part beside it, as adapters have it; counts its calls."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.side = nn.Linear(4, 4)
        self.scaling: Any = {"default": 1.0}
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.plain = torch.ones(4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.remember(x)
        return self.base(x) + self.scaling["default"] * self.side(x) * self.table * self.plain

    def remember(self, x: Tensor) -> None:
        self.last_shape = x.shape


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 4), Adapter())


def extract(out: Path, model: nn.Module | None = None, ids: Any = IDS, **options: Any) -> Tensor:
    store = extract_representations(model or make(), ids, "1", out, batch_size=2, progress=False, **options)
    return store["1"]


def by_global(value: Tensor) -> Tensor:
    return value * FACTOR


def by_helper(value: Tensor) -> Tensor:
    return (lambda part: by_global(part))(value)


def change_scaling(model: Any) -> None:
    model[1].scaling["default"] = 2.0


def change_tensor(model: Any) -> None:
    model[1].plain[2] = 3.0


def change_buffer(model: Any) -> None:
    model[1].table[1] = 2.0


def change_forward(model: Any) -> None:
    model[1].forward = lambda x: x


def change_hook(model: Any) -> None:
    model[1].register_forward_hook(lambda module, args, output: output * 2)


def change_order(model: Any) -> None:
    weight = model[1].base.weight.data
    weight[[1, 2]] = weight[[2, 1]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_scaling, "other rows of batch 0 at 1:out"),
        (change_tensor, "other rows of batch 0 at 1:out"),
        (change_buffer, "model buffers"),
        (change_forward, "other rows of batch 0 at 1:out"),
        (change_hook, "other rows of batch 0 at 1:out"),
        (change_order, "model weights"),
    ],
)
def test_extract_notices_a_change_of_the_model(tmp_path: Path, change: Callable[[Any], None], said: str):
    extract(tmp_path / "a")
    model = make()
    change(model)
    with pytest.raises(InterpError, match=f"made by another extraction.*{said}"):
        extract(tmp_path / "a", model)
    replaced = extract(tmp_path / "a", model, resume=False)
    assert torch.equal(replaced, extract(tmp_path / "b", model))


def test_extract_notices_other_code_of_the_model(tmp_path: Path):
    class Same(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(ids, 9).float()

    first = nn.Sequential(nn.Identity(), Same())
    extract(tmp_path / "a", first)

    class Same(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(ids, 9).double()

    with pytest.raises(InterpError, match="other rows of batch 0 at 1:out"):
        extract(tmp_path / "a", nn.Sequential(nn.Identity(), Same()))


@pytest.mark.parametrize("select", [by_global, by_helper, lambda value: value * FACTOR])
@pytest.mark.parametrize("second", [2.0, torch.full((4,), 2.0)])
def test_extract_notices_another_global_that_select_reads(
    tmp_path: Path, select: Any, second: Any, monkeypatch: pytest.MonkeyPatch
):
    extract(tmp_path / "a", select=select)
    monkeypatch.setitem(globals(), "FACTOR", second)
    with pytest.raises(InterpError, match="other rows of batch 0 at 1:out"):
        extract(tmp_path / "a", select=select)


def test_extract_notices_autocast(tmp_path: Path):
    rows = extract(tmp_path / "a")
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(InterpError, match=r"other rows of batch 0 at 1:out"):
            extract(tmp_path / "a")
        assert not torch.equal(rows, extract(tmp_path / "b").float())


def test_extract_notices_a_later_sample(tmp_path: Path):
    ids = torch.randint(9, (600, 5))
    extract(tmp_path / "a", ids=ids)
    changed = ids.clone()
    changed[301, 3] = (changed[301, 3] + 1) % 9
    with pytest.raises(InterpError, match="batch 150 is not the one that was extracted before"):
        extract(tmp_path / "a", ids=changed)


@pytest.mark.parametrize("loader", [False, True])
def test_extract_notices_any_byte_of_any_sample(tmp_path: Path, loader: bool):
    values = torch.randn(4, 50, 4)
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4))

    def data(values: Tensor) -> Any:
        return torch.utils.data.DataLoader(values, 2) if loader else values

    extract(tmp_path / "a", model, data(values))
    for place in (0, 3, 70, 199):
        changed = values.clone()
        changed[3].view(-1)[place] += 1
        with pytest.raises(InterpError, match=r"dataset crc|batch 1 is not the one"):
            extract(tmp_path / "a", model, data(changed))


def interrupted() -> Iterator[Tensor]:
    yield from IDS.split(2)[:2]
    raise KeyboardInterrupt


def test_extract_mixes_no_edited_rows_with_others(tmp_path: Path):
    model, shift = make(), steer(torch.ones(4))
    with edit(model, {"0:out": shift}), pytest.raises(KeyboardInterrupt):
        extract(tmp_path / "a", model, interrupted())
    with pytest.raises(InterpError, match="other rows of batch 0 at 1:out"):
        extract(tmp_path / "a", model, iter(IDS.split(2)))
    other = edit(model, {"0:out": steer(torch.full((4,), 2.0))})
    with pytest.raises(InterpError, match="other rows of batch 0 at 1:out"), other:
        extract(tmp_path / "a", model, iter(IDS.split(2)))
    with edit(model, {"0:out": steer(torch.ones(4))}):
        rows = extract(tmp_path / "a", model, iter(IDS.split(2)))
        assert torch.equal(rows, extract(tmp_path / "b", model))


def test_extract_takes_what_running_has_changed_for_the_same(tmp_path: Path):
    model = make()
    extract(tmp_path / "a", model)
    assert model[1].calls and model[1].last_shape
    with pytest.warns(UserWarning, match="was there"):
        extract(tmp_path / "a", model)


def make_model(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    settings = {"eps": 1e-5, "last": nn.GELU, "bias": True} | changes
    return nn.Sequential(
        nn.Linear(37, 11, bias=settings["bias"]),
        nn.LayerNorm(11, eps=settings["eps"]),
        nn.BatchNorm1d(11),
        settings["last"](),
    )


def test_model_identity_is_equal_for_equal_models():
    assert model_identity(make_model()) == model_identity(make_model())
    assert model_identity(make_model())["numbers"] == 37 * 11 + 11 + 4 * 11 + 2 * 11 + 1


@pytest.mark.parametrize("change", [{"eps": 1e-6}, {"last": nn.ReLU}, {"bias": False}])
def test_model_identity_sees_settings(change: dict[str, Any]):
    assert model_identity(make_model(**change))["layout"] != model_identity(make_model())["layout"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128])
def test_model_identity_sees_every_single_weight(dtype: torch.dtype):
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(3, 71).to(dtype))
    before = model_identity(model)["weights"]
    for index in range(3 * 71):
        with torch.no_grad():
            kept = model.weight.view(-1)[index].clone()
            model.weight.view(-1)[index] *= 1.5
            assert model_identity(model)["weights"] != before
            model.weight.view(-1)[index] = kept
    assert model_identity(model)["weights"] == before


@pytest.mark.parametrize("rows", [(0, 1), (0, 2), (7, 900)])
def test_model_identity_sees_the_order_of_rows_and_columns(rows: tuple[int, int]):
    first, second = rows
    for swap in (lambda w: w[[first, second]], lambda w: w[:, [first, second]]):
        model = nn.Linear(1024, 1024)
        before = model_identity(model)["weights"]
        with torch.no_grad():
            (swap(model.weight).copy_(swap(model.weight)), model.weight)  # no change
            assert model_identity(model)["weights"] == before
            index = [second, first]
            if swap(model.weight).shape[0] == 2:
                model.weight[[first, second]] = model.weight[index]
            else:
                model.weight[:, [first, second]] = model.weight[:, index]
        assert model_identity(model)["weights"] != before
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    models = nn.Sequential(a, b), nn.Sequential(b, a)
    assert len({model_identity(model)["weights"] for model in models}) == 2


def test_model_identity_reads_views_that_are_not_aligned():
    models = [nn.Module() for _ in range(4)]
    models[0].weight = nn.Parameter(torch.arange(20001.0)[1:])
    models[1].weight = nn.Parameter(torch.arange(1.0, 20001.0))
    models[2].weight = nn.Parameter(torch.arange(32.0).view(4, 8).T)
    models[3].weight = nn.Parameter(torch.arange(32.0).view(4, 8).T.contiguous())
    found = [model_identity(model) for model in models]
    assert found[0] == found[1] and found[2] == found[3]


def test_model_identity_looks_through_wrappers():
    model = make_model()
    before = model_identity(model)
    model[0] = checkpoint_wrapper(model[0])
    assert model_identity(model) == before
    assert model_identity(torch.compile(model)) == before
    assert not is_distributed(model)


def test_model_identity_does_not_depend_on_where_a_model_came_from():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11)
    model = transformers.GPT2LMHeadModel(config).eval()
    before = model_identity(model)
    model.config._name_or_path = "somewhere/else"
    with torch.no_grad():
        model(IDS)
    assert model_identity(model) == before
