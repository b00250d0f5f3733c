"""What does not fit is an InterpError that names it, and not an error from inside of torch or numpy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forge_interp import (
    ActivationStore,
    InterpError,
    ablate,
    activation_patching,
    attribution_patching,
    capture,
    edit,
    extract_representations,
    patch,
    path_patching,
    probe_layers,
    resolve,
    site_means,
    steer,
)
from torch import Tensor, nn

IDS = torch.randint(9, (6, 5), generator=torch.Generator().manual_seed(0))
MODEL = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))


def metric(output: Tensor) -> Tensor:
    return output.sum()


def extracting(**changes: Any) -> Any:
    call: dict[str, Any] = {"model": MODEL, "dataset": IDS, "sites": "1", "progress": False}
    return lambda: extract_representations(**(call | changes))


def editing(edits: Any) -> Any:
    def run() -> None:
        with edit(MODEL, edits):
            MODEL(IDS)

    return run


def capturing(sites: Any, **options: Any) -> Any:
    def run() -> None:
        with capture(MODEL, sites, **options):
            MODEL(IDS)

    return run


def patching(how: Any, **changes: Any) -> Any:
    call: dict[str, Any] = {"clean": IDS, "corrupted": IDS.flip(0), "metric": metric, "progress": False}
    call |= (
        {"senders": "0", "receivers": "1:in", "frozen": "0:in"} if how is path_patching else {"sites": "1"}
    )
    return lambda: how(MODEL, **(call | changes))


def probing(y: Any, layers: Any = None, **options: Any) -> Any:
    layers = {"a": torch.randn(20, 4)} if layers is None else layers
    return lambda: probe_layers(layers, y, **options)


HALF = torch.randn(7)
CASES = {
    "batch_size text": (extracting(batch_size="4"), "batch_size is '4'"),
    "batch_size fraction": (extracting(batch_size=2.5), "batch_size is 2.5"),
    "dtype text": (extracting(dtype="float16"), "dtype is 'float16'"),
    "pool number": (extracting(pool=3), "pool is 3"),
    "rank text": (extracting(rank="0", world_size=1), "rank is '0'"),
    "identity": (extracting(identity=3), "identity is 3"),
    "keep": (extracting(keep=[3]), "keep is 3"),
    "model": (extracting(model=lambda x: x), "model is <function"),
    "extracted sites": (extracting(sites=3), "sites is 3"),
    "extracted select": (extracting(select={"1": 3}), "select is 3"),
    "tuples": (
        extracting(dataset=[(IDS[0], IDS[0]), (IDS[0],)], forward=lambda m, b: m(b[0])),
        r"tuples of lengths \{1, 2\}",
    ),
    "sites": (capturing(3), "sites is 3"),
    "a site": (capturing([None]), "a site is None"),
    "resolved": (lambda: resolve(MODEL, None), "sites is None"),  # type: ignore[arg-type]
    "captured model": (lambda: capture(None, "1").__enter__(), "model is None"),  # type: ignore[arg-type]
    "select": (capturing("1", select="x"), "select is 'x'"),
    "edits": (editing(["1"]), r"edits is \['1'\]"),
    "an edit": (editing({"1": HALF}), "the edit of '1' is tensor"),
    "patch shape": (editing({"1": patch(HALF)}), r"\[7\] in place of .* value \[6, 5, 4\]"),
    "patch where": (editing({"1": patch(0.0, 99)}), r"old\[99\] does not fit a value"),
    "patch text": (editing({"1": patch("x")}), "'?x'? in place of"),  # type: ignore[arg-type]
    "steer shape": (editing({"1": steer(HALF)}), r"steer\(...\[7\].* does not fit"),
    "steer list": (lambda: steer([1.0]), "vector is"),  # type: ignore[arg-type]
    "zero where": (editing({"1": ablate("zero", 99)}), "does not fit"),
    "resample where": (editing({"1": ablate("resample", 99)}), r"'resample', where=99\) does not fit"),
    "mean where": (editing({"1": ablate("mean", 99, mean={"1:out": HALF})}), "does not fit"),
    "mean shape": (editing({"1": ablate("mean", mean=HALF)}), "does not fit"),
    "mean by site": (editing({"1": ablate("mean", mean={"1:out": HALF})}), r"\[7\] of '1:out', .* not fit"),
    "metric none": (patching(activation_patching, metric=lambda o: None), "metric gave a NoneType"),
    "metric text": (patching(activation_patching, metric=lambda o: "x"), "metric gave a str"),
    "path metric": (patching(path_patching, metric=lambda o: None), "metric gave a NoneType"),
    "where": (patching(activation_patching, where={"a": 99}), "'a': 99.* does not fit"),
    "where number": (patching(activation_patching, where=3), "where is 3"),
    "attribution where": (patching(attribution_patching, where={"a": 99}), "'a': 99.* does not fit"),
    "steps": (patching(attribution_patching, steps="3"), "steps is '3'"),
    "receiver_where": (patching(path_patching, receiver_where=99), "receiver_where=99 .*does not fit"),
    "no batches": (lambda: site_means(MODEL, [], "1"), "no batches"),
    "batches": (lambda: site_means(MODEL, None, "1"), "batches is None"),  # type: ignore[arg-type]
    "shapes of means": (
        lambda: site_means(nn.Identity(), [torch.randn(2, 3, 4), torch.randn(2, 3, 5)], ""),
        r"\[4\] and \[5\] in two batches",
    ),
    "probe rows": (probing(torch.zeros(3)), "num_folds is 5, with 3 samples"),
    "probe groups": (probing(torch.arange(20.0), groups=[1] * 20), "num_folds is 5, with 1 groups"),
    "probe nan": (probing(torch.full((20,), torch.nan)), "y holds values that are NaN"),
    "probe nothing": (probing(torch.zeros(20), layers={}), "no layers"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_named(name: str):
    if name.startswith("probe"):
        pytest.importorskip("sklearn")
    run, said = CASES[name]
    with pytest.raises(InterpError, match=said):
        run()


@pytest.mark.parametrize("left_out", ["parts", "sites", "request"])
def test_an_index_without_an_entry_is_refused(tmp_path: Path, left_out: str):
    extract_representations(MODEL, IDS, "1", tmp_path / "a", progress=False)
    path = tmp_path / "a" / "index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in index.items() if key != left_out}))
    with pytest.raises(InterpError, match="is no index"):
        ActivationStore.open(tmp_path / "a")


def test_no_memory_and_errors_of_functions_of_others_stay_what_they_are():
    class Own(Exception):
        pass

    def fails(value: Tensor) -> Tensor:
        raise Own

    def no_memory(value: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    for change, error in ((fails, Own), (no_memory, torch.OutOfMemoryError)):
        with pytest.raises(error):
            editing({"1": change})()
