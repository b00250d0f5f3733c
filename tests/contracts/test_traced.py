"""The figures of steps traced without a GPU: what is kept, and that a worse one is seen."""

import copy
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def traced():
    folders = [str(FOLDER), str(FOLDER / "gpu")]
    sys.path[:0] = folders
    try:
        import traced
    finally:
        for folder in folders:
            sys.path.remove(folder)
    return traced


@pytest.fixture(scope="module")
def kept() -> dict:
    return json.loads((FOLDER / "results" / "traced.json").read_text())["results"]


def test_figures_are_kept_of_every_case_and_bound_what_matters(traced, kept):
    assert {*kept} == {*traced.TRACED, "compiled dense", "compiled experts", "compiled latent attention"}
    for name, figures in kept.items():
        assert figures.get("syncs", 0) == 0, name
        parameters = figures.get("weights_gib", 0) / (2 if "bf16" in name and "moments" not in name else 4)
        if name in traced.TRACED and name != "adamw stochastic":
            assert figures["step_gib"] <= 2 * parameters, name
    assert kept["compiled dense"]["breaks"] == kept["compiled latent attention"]["breaks"] == 0


@pytest.mark.parametrize(
    ("key", "factor"), [("kernels", 1.001), ("peak_gib", 1.01), ("moved_gib", 1.01), ("step_gib", 1.01)]
)
def test_a_worse_figure_is_named_and_a_better_one_is_not(traced, kept, key, factor):
    assert traced.worse(kept, kept) == []
    found = copy.deepcopy(kept)
    found["lion"][key] *= factor
    (said,) = traced.worse(found, kept)
    assert said.startswith(f"lion: {key} was")
    assert traced.worse(kept, found) == []


def test_a_wait_a_break_and_a_case_without_figures_are_named(traced, kept):
    found = copy.deepcopy(kept)
    found["dense 1B"]["syncs"] = 1
    found["compiled dense"]["breaks"] = 1
    found["new"] = {"kernels": 3}
    said = sorted(one.split(":")[0] for one in traced.worse(found, kept))
    assert said == ["compiled dense", "dense 1B", "new"]


def test_trace_sees_what_a_step_takes(traced):
    """A second copy of the gradients for the time of a step would show."""
    from forge_trainer.optim import LionConfig

    class Wasteful(LionConfig):
        def kind(self, parameter):
            return "Lion"

        def build(self, parameters, mesh=None):
            made = super().build(parameters, mesh)
            take = made.step

            def step(*arguments):
                copies = [p.grad.clone() for one in made.param_groups for p in one["params"]]
                take(*arguments)
                del copies

            made.step = step
            return made

    case = traced.Case(model="tiny", tokens=64, micro_batch=2, compile=False)
    plain, wasteful = (traced.trace(case, config) for config in (LionConfig(), Wasteful()))
    assert wasteful["step_gib"] - plain["step_gib"] == pytest.approx(plain["weights_gib"], rel=0.05)
    assert plain["state_gib"] == pytest.approx(plain["weights_gib"], rel=1e-3)
    assert plain["syncs"] == 0
