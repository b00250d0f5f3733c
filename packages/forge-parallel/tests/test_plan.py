"""Plans with mounts: what the flat plan says, its order, and what is refused."""

import pytest
import torch
from forge_parallel.apply import parallelize
from forge_parallel.error import ParallelError
from forge_parallel.mesh import Mesh
from forge_parallel.plan import Plan
from forge_parallel.units import find_units
from torch import nn

TOWER = {
    "blocks": ["blocks.*", "more.*"],
    "units": [["patch", "norm"]],
    "tensor": {"": "unsharded", "norm": "norm"},
    "divisible": {"num_heads": 4},
    "attention": "blocks.*.attention",
    "sequence_inputs": ["patches"],
    "experts": ["blocks.*.experts"],
    "no_fp8": ["patch"],
    "fed_by": {"": ["patches"]},
}
DECODER = {
    "blocks": "layers.*",
    "units": [["embed"], ["norm", "head"]],
    "tensor": {"embed": "embed"},
    "divisible": {"num_heads": 8},
    "output_units": {"layers.*.key": [2]},
    "counts": {"layers.*.attention": ["num_heads"]},
    "attention": ["layers.*.attention", "ahead.attention"],
    "experts": ["layers.*.ffn"],
    "cut_experts": {"layers.*.ffn.experts": "experts"},
    "no_fp8": ["head"],
    "stages": {"first": ["embed"], "last": ["head"], "hidden": "x", "dim": 8},
}
COMPOSITE = {
    "blocks": "mix.*",
    "units": [["gate"]],
    "tensor": {"gate": "tokenwise"},
    "divisible": {"width": 16},
    "mounts": {
        "vision": {"blocks": [], "units": [["", "queries"]], "mounts": {"tower": TOWER}},
        "decoder": DECODER,
    },
    "sequence_inputs": ["tokens"],
}


def test_flat_puts_full_names_in_order_of_execution():
    assert Plan.of(COMPOSITE).flat() == Plan(
        blocks=["vision.tower.blocks.*", "vision.tower.more.*", "decoder.layers.*", "mix.*"],
        units=[
            ["vision.tower.patch", "vision.tower.norm"],
            ["vision", "vision.queries"],
            ["decoder.embed"],
            ["decoder.norm", "decoder.head"],
            ["gate"],
        ],
        tensor={
            "vision.tower": "unsharded",
            "vision.tower.norm": "norm",
            "decoder.embed": "embed",
            "gate": "tokenwise",
        },
        divisible={"vision.tower.num_heads": 4, "decoder.num_heads": 8, "width": 16},
        output_units={"decoder.layers.*.key": [2]},
        counts={"decoder.layers.*.attention": ["num_heads"]},
        attention=[
            "vision.tower.blocks.*.attention",
            "decoder.layers.*.attention",
            "decoder.ahead.attention",
        ],
        experts=["vision.tower.blocks.*.experts", "decoder.layers.*.ffn"],
        cut_experts={"decoder.layers.*.ffn.experts": "experts"},
        no_fp8=["vision.tower.patch", "decoder.head"],
        fed_by={"vision.tower": ["patches"]},
        sequence_inputs=["tokens"],
    )


def test_flat_covers_every_field():
    own = {"stages", "sequence_inputs", "host_inputs", "mounts"}
    full = {"mount": Plan.of(TOWER | DECODER | {"units": [["a"]], "tensor": {"a": "norm"}})}
    flat = Plan(blocks=[], mounts=full).flat()
    for name in set(Plan.__struct_fields__) - own:
        assert getattr(flat, name), f"{name} of a mount is lost"
    assert not any(getattr(flat, name) for name in own)


def test_flat_plan_without_mounts_says_the_same():
    plan = Plan.of(DECODER)
    flat = plan.flat()
    assert (flat.block_patterns, flat.attention_patterns) == (plan.block_patterns, plan.attention_patterns)
    rest = set(Plan.__struct_fields__) - {"blocks", "attention"}
    assert all(getattr(flat, name) == getattr(plan, name) for name in rest)


@pytest.mark.parametrize(
    ("key", "own"), [("tensor", {"tower.norm": "norm"}), ("divisible", {"tower.num_heads": 2})]
)
def test_flat_refuses_two_entries_for_one_name(key, own):
    plan = Plan.of({"blocks": [], "mounts": {"tower": TOWER}, key: own})
    with pytest.raises(ParallelError, match=rf"'{next(iter(own))}' is in `{key}` of a mount and of the plan"):
        plan.flat()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"block": "x.*"}, r"not a plan of mount outer\.inner: .*unknown field `block`"),
        (
            {"tensor": {"x": "sideways"}},
            r"outer\.inner\.x has the tensor role 'sideways'; expected one of embed, norm",
        ),
        ({"mounts": ["x"]}, r"not a plan of mount outer\.inner: .*\$\.mounts"),
    ],
)
def test_of_names_the_mount_whose_data_are_wrong(wrong, said):
    inner = {"blocks": "x.*"} | wrong
    with pytest.raises(ParallelError, match=said):
        Plan.of({"blocks": [], "mounts": {"outer": {"blocks": [], "mounts": {"inner": inner}}}})


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), nn.Linear(2, 2)

    def parallel_plan(self):
        return {"blocks": "layers.*", "units": [["head"]]}


class Pair(nn.Module):
    """Publishes what its parts publish. Its decoder is executed last, and comes first among its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.tower = Part(), Part()

    def parallel_plan(self):
        parts = [name for name in ("tower", "decoder") if getattr(self, name) is not None]
        return {"blocks": [], "mounts": {name: getattr(self, name).parallel_plan() for name in parts}}


def test_units_of_a_composite_are_in_order_of_execution():
    model = Pair()
    units = find_units(model, Plan.of(model).flat(), Mesh(torch.device("cpu")))
    assert units.block_modules == [*model.tower.layers, *model.decoder.layers]
    assert [unit.modules for unit in units.groups] == [[model.tower.head], [model.decoder.head]]


def test_part_without_a_sub_module_leaves_its_mount_out():
    model = Pair()
    model.tower = None
    parallelize(model, Mesh(torch.device("cpu")), Plan.of(model))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"mounts": {"encoder": {"blocks": "layers.*"}}}, "mount 'encoder' names no module of Pair"),
        (
            {"mounts": {"tower": {"blocks": [], "mounts": {"inner": {"blocks": []}}}}},
            r"mount 'tower\.inner' names no module",
        ),
        ({"mounts": {"tower": {"blocks": "stack.*"}}}, r"'tower\.stack\.\*' names no module"),
        ({"mounts": {"tower": {"blocks": [], "units": [["foot"]]}}}, r"'tower\.foot' names no module"),
        ({"mounts": {"tower": {"blocks": [], "tensor": {"foot": "norm"}}}}, r"'tower\.foot' names no module"),
        ({"mounts": {"tower": {"blocks": [], "no_fp8": ["foot"]}}}, r"'tower\.foot' names no module"),
        ({"mounts": {"tower": {"blocks": [], "experts": ["foot"]}}}, r"'tower\.foot' names no module"),
        ({"mounts": {"tower": {"blocks": [], "attention": "foot"}}}, r"'tower\.foot' names no module"),
        ({"units": [[""]]}, "the model itself, which is the root"),
        ({"mounts": {"tower": {"blocks": ["layers.*", ""]}}}, r"block tower\.layers\.0 and in block tower"),
    ],
)
def test_parallelize_names_what_a_plan_with_mounts_cannot_find(plan, said):
    with pytest.raises(ParallelError, match=said):
        parallelize(Pair(), Mesh(torch.device("cpu")), Plan.of({"blocks": []} | plan))
