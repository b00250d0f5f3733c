from pathlib import Path
from typing import Any, Literal

import pytest
import tomli
from forge_config import Config, ConfigError, Registry, digest, load, plain, to_toml
from forge_config.toml import dumps


class Part(Config):
    """Interface."""


parts = Registry("part", Part, default="a")


@parts.register("a")
class A(Part):
    n: int = 1


@parts.register("b")
class B(Part):
    inner: Part = A()


class Leaf(Config):
    number: int | None = None
    rate: float = 0.5
    text: str = ""


class Job(Config):
    leaf: Leaf = Leaf()
    optional: Leaf | None = None
    part: Part = A()
    leaves: list[Leaf] = []
    parts: dict[str, Part] = {}
    pair: tuple[float, str] = (0.0, "")
    rates: list[float] = []
    limit: float | None = 1.0
    size: int | Literal["auto"] = "auto"
    path: Path = Path("x")
    free: dict[str, Any] = {}


FULL = Job(
    leaf=Leaf(number=3, rate=1e-9, text='quo"te\n\u00e9\x7f\\'),
    optional=Leaf(),
    part=B(inner=B(inner=A(n=5))),
    leaves=[Leaf(), Leaf(number=1)],
    parts={"odd name": A(), "": B(), 'q"': A(n=2)},
    pair=(float("inf"), "x"),
    rates=[float(n) for n in range(100)],
    limit=None,
    size=4,
    path=Path("/a/b"),
    free={"list": [1, {"a": {"b": []}}], "table": {}, "tables": [{"x": 1}, {}], "k.ey": {"z": [[], [1]]}},
)


@pytest.mark.parametrize("job", [Job(), FULL], ids=["default", "full"])
def test_to_toml_loads_to_the_same_value_and_digest(job, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(to_toml(job))
    again = load(Job, path).value
    assert again == job
    assert digest(again) == digest(job)


def test_dumps_agrees_with_tomli():
    tree = plain(FULL)
    assert tomli.loads(dumps(tree)) == tree


def test_dumps_writes_comments_that_change_nothing():
    tree = plain(FULL)
    commented = dumps(
        tree, {"leaf.rate": "a.toml:3", "leaves[1].number": "--flag", 'parts."odd name".n': "preset x"}
    )
    assert tomli.loads(commented) == tree
    assert "rate = 1e-09  # a.toml:3\n" in commented
    assert "number = 1  # --flag\n" in commented
    assert "n = 1  # preset x\n" in commented


def test_dumps_writes_long_arrays_one_item_a_line():
    assert dumps({"short": [1, 2]}) == "short = [1, 2]\n"
    assert dumps({"long": ["x" * 60, "y" * 60]}) == f'long = [\n    "{"x" * 60}",\n    "{"y" * 60}",\n]\n'


def test_plain_leaves_none_out_unless_the_default_is_something_else():
    assert "number" not in plain(Leaf())
    assert plain(Job(limit=None))["limit"] == "none"


def test_plain_refuses_none_where_toml_cannot_say_it():
    class Ambiguous(Config):
        name: str | None = "x"

    with pytest.raises(ConfigError, match=r"Ambiguous\.name is None"):
        plain(Ambiguous(name=None))


def test_plain_writes_whole_numbers_of_float_fields_as_floats():
    tree = plain(Job(leaf=Leaf(rate=2), rates=[1], pair=(3, "")))
    found = (tree["leaf"]["rate"], tree["rates"][0], tree["pair"][0])
    assert found == (2.0, 1.0, 3.0) and {type(one) for one in found} == {float}


def test_digest_ignores_the_order_of_keys_and_the_way_of_writing(load_text):
    a = load_text(Job, "leaf = {rate = 2, text = 'x'}\n[parts.a]\n[parts.b]").value
    b = load_text(Job, '[parts]\nb.type = "a"\na.n = 1\n[leaf]\ntext = "x"\nrate = 2.0').value
    assert digest(a) == digest(b)


@pytest.mark.parametrize(
    "other", [Job(limit=None), Job(part=B()), Job(leaves=[Leaf()]), Job(optional=Leaf())]
)
def test_digest_differs_for(other):
    assert digest(other) != digest(Job())
