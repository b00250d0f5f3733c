from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from forge_config import Config, ConfigError, Meta, Registry, load
from msgspec import field


class Shape(Config):
    """Interface."""

    lr: float = 1.0


shapes = Registry("shape", Shape, default="round")


@shapes.register("round")
class Round(Shape):
    radius: Annotated[int, Meta(ge=1)] = 1


@shapes.register("square")
class Square(Shape):
    side: int


class Leaf(Config):
    n: int = 0


class Box(Config):
    number: Annotated[int, Meta(ge=1, le=9, multiple_of=3)] = 3
    rate: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    name: Annotated[str, Meta(pattern="^[a-z]+$", min_length=2)] = "ab"
    on: bool = False
    kind: Literal["cosine", "linear", 3] = "cosine"
    path: Path = Path("x")
    pair: tuple[int, float] = (1, 2.0)
    many: tuple[int, ...] = ()
    items: Annotated[list[int], Meta(max_length=2)] = []
    leaves: list[Leaf] = []
    by_name: dict[str, Leaf] = {}
    free: dict[str, Any] = {}
    size: int | Literal["auto"] = "auto"
    limit: Annotated[float, Meta(ge=0)] | None = 1.0
    leaf: Leaf | None = None
    maybe: Leaf | list[Leaf] | None = None
    shape: Shape = Round()
    shapes: list[Shape] = []
    named: dict[str, Shape] = {}
    other: Shape | None = None


class Job(Config):
    box: Box = Box()


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("number = 6", "number", 6),
        ("rate = 0.25", "rate", 0.25),
        ("on = true", "on", True),
        ("kind = 3", "kind", 3),
        ('path = "/a/b"', "path", Path("/a/b")),
        ("pair = [3, 4]", "pair", (3, 4.0)),
        ("many = [3, 4]", "many", (3, 4)),
        ("leaves = [{n = 1}, {}]", "leaves", [Leaf(n=1), Leaf()]),
        ("[box.by_name.x]\nn = 1", "by_name", {"x": Leaf(n=1)}),
        ("free = {a = [1, {b = 2}]}", "free", {"a": [1, {"b": 2}]}),
        ("size = 4", "size", 4),
        ('size = "auto"', "size", "auto"),
        ("limit = 2", "limit", 2.0),
        ('limit = "none"', "limit", None),
        ("leaf = {n = 2}", "leaf", Leaf(n=2)),
        ("leaf = {}", "leaf", Leaf()),
        ("maybe = [{n = 2}]", "maybe", [Leaf(n=2)]),
        ("maybe = {n = 2}", "maybe", Leaf(n=2)),
        ("shape.radius = 4", "shape", Round(radius=4)),
        ('shape = {type = "square", side = 2, lr = 3}', "shape", Square(side=2, lr=3.0)),
        ('shapes = [{type = "square", side = 2}, {}]', "shapes", [Square(side=2), Round()]),
        ('named.a = {type = "square", side = 2}', "named", {"a": Square(side=2)}),
        ("other = {}", "other", Round()),
    ],
)
def test_value_is_decoded(load_text, text, name, value):
    found = getattr(load_text(Job, f"[box]\n{text}").value.box, name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("number = 0", "box.number: given 0; expected integer >= 1, <= 9, a multiple of 3"),
        ("number = 4", "given 4; expected integer >= 1, <= 9, a multiple of 3"),
        ("number = 3.0", "given 3.0; expected integer"),
        ('number = "none"', 'given "none"; expected integer'),
        ("number = true", "given true; expected integer"),
        ('number = "3"', 'given "3"; expected integer'),
        ("rate = 1", "given 1; expected number > 0, < 1"),
        ("rate = nan", "given nan; expected number > 0, < 1"),
        ("rate = true", "given true; expected number"),
        ("limit = inf", "given inf; expected number >= 0"),
        ("rate = [0.5]", "given [0.5]; expected number"),
        ('name = "A"', 'given "A"; expected string of length >= 2, like `^[a-z]+$`'),
        ('name = "a"', 'given "a"; expected string of length >= 2'),
        ("name = 3", "given 3; expected string of length >= 2, like `^[a-z]+$`; put it in quotes"),
        ('on = "true"', 'given "true"; expected true or false; write true without quotes'),
        ("on = 1", "given 1; expected true or false"),
        ('kind = "cosin"', 'expected 3 or "cosine" or "linear"; did you mean \'cosine\'?'),
        ("kind = 3.0", "expected"),
        ("path = 3", "expected path"),
        ("pair = [1]", "expected array of 2 (integer, number)"),
        ("pair = [1, true]", "box.pair[1]: given true; expected number"),
        ("items = [1, 2, 3]", "expected array of integer (of length <= 2)"),
        ("items = 3", "given 3; expected array of integer"),
        ("leaves = [{n = 1}, {m = 1}]", "box.leaves[1].m: unknown key 'm'; known: n"),
        ("leaves = {n = 1}", "expected array of table"),
        ('by_name.x.n = "y"', 'box.by_name.x.n: given "y"; expected integer'),
        ('size = "autos"', 'given "autos"; expected integer or "auto"'),
        ("limit = -1", "given -1; expected number >= 0"),
        ("leaf = 3", "given 3; expected table"),
        ('leaf.n = "y"', "box.leaf.n: given"),
        ('shape = "round"', "expected table"),
        ('shape.type = "rond"', "box.shape.type: unknown shape type 'rond'; did you mean 'round'?"),
        ("shape.type = 3", "box.shape.type: given 3; expected one of round, square"),
        ("shape.side = 3", "box.shape.side: unknown key 'side'; known: lr, radius, type"),
        ('shape.type = "square"', "box.shape.side: missing; expected integer"),
        (
            'named.a = {type = "x"}',
            "box.named.a.type: unknown shape type 'x'; known: round, square; one of your own joins "
            'by imports = ["its_module"]',
        ),
    ],
)
def test_mistake_is_reported_with_its_key(mistakes, text, message):
    found = mistakes(Job, f"\n[box]\n{text}\n")
    assert len(found) == 1
    assert found[0].startswith("  job.toml:3: ") and message in found[0]


def test_every_item_of_an_array_is_looked_at(mistakes):
    found = mistakes(Job, '[box]\nmany = [\n  1,\n  "a",\n  2.5,\n]')
    assert [line.split(":")[1] for line in found] == ["4", "5"]


class Demanding(Config):
    needed: int
    also: str


class Twice(Config):
    first: Demanding
    second: Demanding | None
    shape: Shape


def test_absent_section_reports_the_keys_it_lacks(mistakes):
    assert mistakes(Twice, "") == [
        "  job.toml: first.needed: missing; expected integer",
        "  job.toml: first.also: missing; expected string",
        "  job.toml: second: missing; expected table",
    ]


def test_absent_open_section_is_of_the_default_type(load_text):
    assert load_text(Twice, "first={needed=1, also='a'}\nsecond={needed=1, also='a'}").value.shape == Round()


class Divided(Config):
    dim: int = 8
    heads: int = 2

    def __post_init__(self):
        if self.dim % self.heads:
            raise ValueError(f"dim = {self.dim} is no multiple of heads = {self.heads}; change one")


class Outer(Config):
    part: Divided = Divided()


def test_check_of_a_section_names_the_places_of_its_keys(mistakes):
    assert mistakes(Outer, "[part]\ndim = 9\nheads = 4") == [
        "  job.toml:2: part: dim = 9 is no multiple of heads = 4; change one "
        "(part.dim from job.toml:2, part.heads from job.toml:3)"
    ]


def test_check_of_a_section_sees_the_final_values_only(load_text):
    assert load_text(Outer, "[part]\nheads = 3", ["--part.dim=9"]).value.part.dim == 9


class Preset(Config):
    preset: str | None = None
    dim: int
    inner: Leaf = Leaf()

    @classmethod
    def expand(cls, given):
        if "preset" not in given:
            return given
        if given["preset"] != "big":
            raise ValueError(f"unknown preset {given['preset']!r}; expected big")
        given.setdefault("dim", 64)
        given["inner"] = {"n": 5} | given.get("inner", {})
        return given


class WithPreset(Config):
    model: Preset


def test_preset_fills_in_beneath_given_keys_with_its_origin(load_text):
    loaded = load_text(WithPreset, '[model]\npreset = "big"\n', ["--model.dim=32"])
    assert loaded.value.model == Preset(preset="big", dim=32, inner=Leaf(n=5))
    assert loaded.origins["model.dim"] == "--model.dim=32"
    assert loaded.origins["model.inner.n"] == "preset big"


class FromFolder(Config):
    from_: str | None = field(default=None, name="from")
    dim: int = 1

    @classmethod
    def expand(cls, given):
        return {"dim": 64} | {key: one for key, one in given.items() if key != "from"}


class WithFolder(Config):
    model: FromFolder = FromFolder()


def test_what_a_folder_fills_in_is_told_by_its_name(load_text):
    loaded = load_text(WithFolder, '[model]\nfrom = "some/where"\n')
    assert loaded.value.model.dim == 64 and loaded.origins["model.dim"] == "from some/where"


def test_unknown_preset_is_one_problem(mistakes):
    assert mistakes(WithPreset, '[model]\npreset = "bog"') == [
        "  job.toml:2: model: unknown preset 'bog'; expected big"
    ]


class Tree(Config):
    value: int = 0
    children: "list[Tree]" = []


class Forest(Config):
    root: Tree = Tree()


def test_struct_may_hold_itself(load_text):
    job = load_text(Forest, "[root]\n[[root.children]]\n[[root.children.children]]\nvalue = 3").value
    assert job.root.children[0].children[0].value == 3


def test_annotation_that_no_configuration_can_hold_is_a_bug_of_the_struct(load_text):
    class Wrong(Config):
        data: bytes

    with pytest.raises(TypeError, match="a field of a Config cannot be BytesType"):
        load_text(Wrong, 'data = "x"')


class Direct(Config):
    shape: Square


def test_registered_struct_named_directly_may_carry_its_type(load_text, mistakes):
    assert load_text(Direct, 'shape = {type = "square", side = 1}').value.shape.side == 1
    assert len(mistakes(Direct, 'shape = {type = "round", side = 1}')) == 1


class Two(Config):
    low: int = 0
    high: int = 1
    name: str = "a"

    def contradictions(self):
        if self.low > self.high:
            yield f"low = {self.low} is above high = {self.high}"
        if self.name == "b" and self.low:
            yield f'name = "b" with low = {self.low}'


class Holds(Config):
    two: Two = Two()


def test_all_contradictions_of_a_section_are_told_each_with_its_place(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('[two]\nlow = 3\nname = "b"\n')
    with pytest.raises(ConfigError) as raised:
        load(Holds, file, ["--two.high=2"])
    lines = str(raised.value).splitlines()
    assert any("low = 3 is above high = 2" in line and "a.toml:2" in line for line in lines), lines
    assert any('name = "b" with low = 3' in line and "a.toml:3" in line for line in lines), lines
    with pytest.raises(ValueError, match='low = 3 is above high = 1; name = "b" with low = 3'):
        Two(low=3, name="b")
