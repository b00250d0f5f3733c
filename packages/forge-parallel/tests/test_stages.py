from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest
from forge_parallel.compile_config import CompileConfig
from forge_parallel.config import ParallelConfig, PipelineConfig, TensorParallelConfig
from forge_parallel.error import ParallelError
from forge_parallel.plan import Plan
from forge_parallel.stages import balanced, keep_stage
from forge_parallel.tensor_parallel import _overlap
from torch import nn


def every_cut(count: int, stages: int) -> list[list[int]]:
    edges = ([0, *inner, count] for inner in combinations(range(1, count), stages - 1))
    return [[b - a for a, b in pairwise(cut)] for cut in edges]


def sums(values: list[int], cut: list[int]) -> list[int]:
    return [sum(values[sum(cut[:i]) : sum(cut[: i + 1])]) for i in range(len(cut))]


@pytest.mark.parametrize("most", [0, 12, 15, 19, 26])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("first", [0, 7])
def test_balanced_costs_least_of_all_cuts_that_keep_the_bound(first, stages, most):
    costs, last, sizes = [3, 1, 4, 1, 5, 9, 2], 6, [9, 2, 6, 5, 3, 5, 8]

    def cost(cut: list[int]) -> int:
        found = sums(costs, cut)
        found[0] += first
        return max([*found[:-1], found[-1] + last])

    allowed = [cut for cut in every_cut(7, stages) if not most or max(sums(sizes, cut)) <= most]
    if allowed:
        assert cost(balanced(costs, last, stages, sizes, most, first)) == min(map(cost, allowed))
        return
    least = min(max(sums(sizes, cut)) for cut in every_cut(7, stages))
    with pytest.raises(ParallelError, match=f"the largest has {least} at best"):
        balanced(costs, last, stages, sizes, most, first)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 4)
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4, bias=False) for i in range(6)})
        self.head = nn.Linear(4, 5, bias=False)


def test_bound_counts_the_embedding():
    plan = Plan.of(
        {"blocks": "layers.*", "stages": {"first": ["embed"], "last": ["head"], "hidden": "x", "dim": 4}}
    )
    lengths = {}
    for bound in (0, 440):
        model = Net()
        keep_stage(model, plan, 0, 2, PipelineConfig(max_parameters=bound))
        lengths[bound] = len(model.layers)
    assert lengths == {0: 4, 440: 2}
    with pytest.raises(ParallelError, match="max_parameters = 400 cannot be kept by 2 stages"):
        keep_stage(Net(), plan, 0, 2, PipelineConfig(max_parameters=400))


def test_cut_follows_the_costs_of_the_plan():
    stages = {"first": ["embed"], "last": ["head"], "hidden": "x", "dim": 4}
    for costs, first, last, kept in (
        ([1, 1, 1, 1, 1, 1], 0, 0, 3),
        ([1, 1, 1, 1, 1, 1], 0, 2, 4),
        ([1, 1, 1, 1, 1, 1], 2, 0, 2),
        ([9, 1, 1, 1, 1, 1], 0, 0, 1),
        ([], 0, 0, 4),
        ([], 3 * 16, 0, 2),  # a layer has 16 elements, the head 20
    ):
        ends = {"costs": costs, "first_cost": first, "last_cost": last}
        plan = Plan.of({"blocks": "layers.*", "stages": stages | ends})
        model = Net()
        keep_stage(model, plan, 0, 2, PipelineConfig())
        assert len(model.layers) == kept


STAGES = {"first": ["embed"], "last": ["head"], "hidden": "x", "dim": 4}


class Composite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.decoder = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4)])}), Net()


def test_stages_cut_the_blocks_of_a_mount_and_keep_what_lies_in_mounts_by_full_names():
    stages = STAGES | {
        "first": ["tower", "decoder.embed"],
        "last": ["decoder.head"],
        "blocks": "decoder.layers.*",
        "costs": [1] * 6,
    }
    mounts = {"tower": {"blocks": "layers.*"}, "decoder": {"blocks": "layers.*"}}
    plan = Plan.of({"blocks": [], "mounts": mounts, "stages": stages})
    first, last = Composite(), Composite()
    keep_stage(first, plan, 0, 2, PipelineConfig())
    keep_stage(last, plan, 1, 2, PipelineConfig())
    assert list(first.decoder.layers) == ["0", "1", "2"] and list(last.decoder.layers) == ["3", "4", "5"]
    assert (first.decoder.head, last.decoder.embed, last.tower) == (None, None, None)
    assert first.tower is not None and first.decoder.embed is not None and last.decoder.head is not None


@pytest.mark.parametrize(
    ("blocks", "stages", "said"),
    [
        ([], {}, r"`blocks` are \[\], which is not one pattern; say in `stages\.blocks`"),
        (["layers.*", "head"], {}, r"`blocks` are \['layers\.\*', 'head'\]"),
        ([], {"blocks": "stack.*"}, r"pattern 'stack\.\*' names no module of Net"),
        ("layers.*", {"first": ["embed", "tower"]}, "module 'tower' names no module of Net"),
        ("layers.*", {"last": ["head", "tower"]}, "module 'tower' names no module of Net"),
    ],
)
def test_stages_that_name_nothing_are_refused(blocks, stages, said):
    plan = Plan.of({"blocks": blocks, "stages": STAGES | stages})
    with pytest.raises(ParallelError, match=said):
        keep_stage(Net(), plan, 0, 2, PipelineConfig(layers=[3, 3]))


def test_overlap_needs_gpus_the_compiler_and_sequences():
    with pytest.raises(ParallelError, match="needs GPUs that reach each other's memory, not a cpu"):
        _overlap(SimpleNamespace(device_type="cpu"))  # type: ignore[arg-type]
    overlapped = TensorParallelConfig(async_=True)
    with pytest.raises(ValueError, match="sequence = true"):
        TensorParallelConfig(async_=True, sequence=False)
    with pytest.raises(ValueError, match="done by the compiler"):
        ParallelConfig(tensor_parallel=overlapped)
    ParallelConfig(tensor_parallel=overlapped, compile=CompileConfig(enabled=True))
