"""Norms of layers and the noise scale of gradients under layouts, against plain sums in one process."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from forge_data.loading.loader import MicroBatch
from forge_model import DecoderConfig
from forge_model.attention.config import GroupedQueryConfig
from forge_model.config import MoEConfig, SigmoidRouterConfig
from forge_parallel.testing import run_ranks
from forge_trainer.hooks import NormsConfig
from forge_trainer.optim import AdamWConfig, GroupRule, MuonConfig
from forge_trainer.progress import Progress
from forge_trainer.steps.noise_scale import DECAY, NoiseScaleStep
from forge_trainer.steps.text import TextStep
from msgspec.structs import replace
from parity import TOKENS, VOCAB, batch, made

MODEL = DecoderConfig(
    vocab_size=VOCAB, dim=16, num_layers=2, max_tokens=TOKENS, attention=GroupedQueryConfig(num_heads=4)
)
EXPERTS = replace(MODEL, ffn=MoEConfig(num_experts=4, dim=12, shared_experts=1, router=SigmoidRouterConfig()))
RULES = (GroupRule(match=("embed",), freeze_from=0), GroupRule(match=("layers.0.ffn",), freeze_until=3))
LAYOUTS = {
    "fsdp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "hsdp2x2": (4, {"dp_replicate": 2}),
    "fsdp2-cp2": (4, {"cp": 2}),
    "fsdp2-ep2": (4, {"ep": 2}),
}
QUICK = {"fsdp2", "pp2"}
CLIP = 0.5  # of `made`


def slow_unless(quick: set) -> list:
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in LAYOUTS]


def watched(sizes: dict, experts: bool, by: str) -> list[dict[str, float]]:
    """What the hook logs in four steps, every second of which it looks at."""
    run = made(
        sizes,
        EXPERTS if experts else MODEL,
        "float64",
        optimizer=MuonConfig(lr=0.01, scale="original", groups=RULES),
    )
    logged: list[dict[str, float]] = []
    progress = Progress(until=5)
    view = SimpleNamespace(
        parts=run.parts,
        optimizer=run.optimizer,
        mesh=run.mesh,
        progress=progress,
        job=SimpleNamespace(train=SimpleNamespace(clip_norm=CLIP)),
        log=logged.append,
    )
    hook = NormsConfig(every_steps=2, by=by).build(view)
    for index in range(5):
        out = run.step.train(batch(index, run.mesh), index)
        progress.advance(out)
        if progress.step in (2, 4, 5):
            hook.on_step(progress, out)
            logged[-1]["total"] = out.grad_norm.item()
    hook.close()
    return logged


def by_hand() -> list[dict[str, float]]:
    """The same from whole tensors, with gradients of a backward pass of its own."""
    config = MuonConfig(lr=0.01, scale="original", groups=RULES)
    run = made({}, MODEL, "float64", optimizer=config)
    (model,) = run.parts
    found: list[dict[str, float]] = []
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for index in range(5):
        before = {name: p.detach().clone() for name, p in trained.items()}
        grads: dict[str, torch.Tensor] = {}
        handles = [
            p.register_post_accumulate_grad_hook(
                lambda p, n=name, to=grads: to.__setitem__(n, p.grad.clone())
            )
            for name, p in trained.items()
        ]
        run.step.train(batch(index, run.mesh), index)
        for handle in handles:
            handle.remove()
        if index < 3:  # frozen until step 3: no gradient reaches the optimizer
            grads = {name: g * (not name.startswith("layers.0.ffn.")) for name, g in grads.items()}
        numbers = {}
        for name, p in trained.items():
            numbers[f"norms/weight/{name}"] = before[name].norm().item()
            numbers[f"norms/grad/{name}"] = grads[name].norm().item()
            numbers[f"norms/update_ratio/{name}"] = ((p - before[name]).norm() / before[name].norm()).item()
        found.append(numbers)
    return [found[1], found[3], found[4]]


def compare(found: list[dict], expected: list[dict]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=1e-8, abs=1e-12), name


@pytest.mark.dist
def test_norms_are_those_of_whole_tensors():
    found = run_ranks(watched, 1, {}, False, "parameter")[0]
    for numbers in found:
        total = numbers.pop("total")
        grads = [value for name, value in numbers.items() if name.startswith("norms/grad/")]
        assert total == pytest.approx(sum(g * g for g in grads) ** 0.5, rel=1e-5)
    compare(found, run_ranks(by_hand, 1)[0])
    assert found[0]["norms/update_ratio/layers.0.ffn.w_up.weight"] == 0.0
    assert found[1]["norms/update_ratio/layers.0.ffn.w_up.weight"] > 0.0


@cache
def norms_of_one(experts: bool) -> list[dict[str, float]]:
    return run_ranks(watched, 1, {}, experts, "layer")[0]


@pytest.mark.dist
@pytest.mark.parametrize("layout", slow_unless(QUICK))
def test_norms_under_a_layout_are_those_of_one_process(layout):
    ranks, sizes = LAYOUTS[layout]
    one = norms_of_one("ep" in sizes)
    assert {name for name in one[0] if name.startswith("norms/grad/")} == {
        f"norms/grad/{layer}" for layer in ("layers.0", "layers.1", "norm", "head")
    }
    for many in run_ranks(watched, ranks, sizes, "ep" in sizes, "layer"):
        compare(many, one)


def measured(sizes: dict, readers: int, bad: int = -1, experts: bool = False) -> list[dict[str, float]]:
    """What the step tells of five steps, of which it measures every second.

    In one process, the first micro-batch is made of the first ones of all ranks that read elsewhere.
    """
    model = EXPERTS if experts else MODEL
    run = made(sizes, model, "float64", optimizer=AdamWConfig(lr=0.01))
    step = NoiseScaleStep(run.parts, run.step.loss_fn, run.mesh, 0, run.step.update, every=2)
    found = []
    for index in range(5):
        micros = batch(index, run.mesh)
        if run.mesh.batch.size == 1 and readers > 1:
            parts = batch(index, run.mesh, 2 * readers)
            micros = [joined(parts[half::2]) for half in (0, 1)]
        if index == bad:
            parameter = next(iter(run.parts[0].parameters()))
            handle = parameter.register_hook(lambda gradient: gradient * float("nan"))
        out = step.train(micros, index)
        if index == bad:
            handle.remove()
        found.append({n: v.item() for n, v in out.metrics.items() if n.startswith("noise_scale")})
    return found


def joined(micros: list[MicroBatch]) -> MicroBatch:
    inputs = {name: torch.cat([micro.inputs[name] for micro in micros]) for name in micros[0].inputs}
    return MicroBatch(inputs, {"targets": sum(micro.statistics["targets"] for micro in micros)})


def noise_by_hand() -> list[tuple[float, float]]:
    """tr(S) and |G|^2 of the second and the fourth batch, from gradients of halves by themselves."""
    run = made({}, MODEL, "float64", optimizer=AdamWConfig(lr=0.01))
    (model,) = run.parts
    found = []
    for index in range(4):
        micros = batch(index, run.mesh)
        if index % 2:
            squares, counts = [], []
            for part in (micros[:1], micros):
                model.zero_grad()
                count = sum(micro.statistics["targets"] for micro in part)
                for micro in part:
                    (model(**micro.inputs, loss_fn=run.step.loss_fn).total / count).backward()
                squares.append(sum(p.grad.square().sum().item() for p in model.parameters()))
                counts.append(count.item())
            model.zero_grad(set_to_none=True)
            (b, big), (few, all_) = squares, counts
            found.append(((b - big) / (1 / few - 1 / all_), (all_ * big - few * b) / (all_ - few)))
        TextStep.train(run.step, micros, index)
    return found


@pytest.mark.dist
def test_noise_scale_is_that_of_its_formulas():
    found = run_ranks(measured, 1, {}, 1)[0]
    first, second = run_ranks(noise_by_hand, 1)[0]
    assert found[0] == {}
    weight = DECAY + 1
    trace, squared = ((DECAY * a + b) / weight for a, b in zip(first, second, strict=True))
    for numbers, expected in ((found[1], first), (found[2], first), (found[3], (trace, squared))):
        assert numbers["noise_scale/trace"] == pytest.approx(expected[0], rel=1e-9)
        assert numbers["noise_scale/squared_gradient"] == pytest.approx(expected[1], rel=1e-9)
        assert numbers["noise_scale"] == pytest.approx(expected[0] / expected[1], rel=1e-9)


@pytest.mark.dist
def test_step_that_is_not_finite_does_not_count():
    found = run_ranks(measured, 1, {}, 1, 3)[0]
    assert found[3] == found[2] == found[1]


@pytest.mark.dist
@pytest.mark.parametrize("layout", [p for p in slow_unless({"fsdp2"}) if "pp" not in p.values[0]])
def test_noise_scale_under_a_layout_is_that_of_one_process(layout):
    ranks, sizes = LAYOUTS[layout]
    readers = ranks // (sizes.get("tp", 1) * sizes.get("cp", 1))
    experts = "ep" in sizes
    one = run_ranks(measured, 1, {}, readers, -1, experts)[0]
    for many in run_ranks(measured, ranks, sizes, readers, -1, experts):
        for mine, theirs in zip(many, one, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-8)
