import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from forge_config import Config, Meta, Registry, plain, schema


class Part(Config):
    """Interface."""


parts = Registry("part", Part, default="a")


@parts.register("a")
class A(Part):
    """The first part.

    Attributes:
        n: how many.
    """

    n: Annotated[int, Meta(ge=1, le=4)] = 1


@parts.register("b")
class B(Part):
    """The second part."""

    inner: Part
    must: str


class Leaf(Config):
    name: Annotated[str, Meta(pattern="^a", min_length=2)]
    kind: Literal["x", "y"] = "x"


class Job(Config):
    """A job."""

    part: Part = A()
    parts: dict[str, Part] = {}
    leaves: list[Leaf] = []
    limit: Annotated[float, Meta(gt=0)] | None = 1.0
    pair: tuple[int, bool] = (1, True)
    path: Path | None = None
    free: dict[str, Any] = {}
    leaf: Leaf | None = None


def test_schema_is_json_with_every_reference_defined():
    text = json.dumps(schema(Job))
    names = {part.split('"')[0] for part in text.split('"$ref": "#/$defs/')[1:]}
    assert names == set(schema(Job)["$defs"]) == {"A", "B", "Leaf"}


def test_schema_describes_keys_from_docstrings_with_bounds_and_defaults():
    assert schema(Job)["$defs"]["A"] == {
        "type": "object",
        "description": "The first part.",
        "properties": {
            "type": {"const": "a"},
            "n": {"type": "integer", "minimum": 1, "maximum": 4, "description": "how many.", "default": 1},
        },
        "additionalProperties": False,
    }


def test_schema_of_an_open_section_is_chosen_by_type():
    choices = [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]
    known = {"type": "object", "properties": {"type": {"enum": ["a", "b"]}}}
    assert schema(Job)["properties"]["part"] == known | {"anyOf": choices, "default": {"type": "a", "n": 1}}
    whole = schema(Job, partial=False)["properties"]["parts"]["additionalProperties"]
    assert whole == known | {"oneOf": [choices[0], choices[1] | {"required": ["type"]}]}


def test_schema_of_an_open_section_without_structs_allows_no_type():
    class Plug(Config):
        pass

    class Plugged(Config):
        plugs: dict[str, Plug]

    Registry("plug", Plug)
    entry = schema(Plugged)["properties"]["plugs"]["additionalProperties"]
    assert entry == {"type": "object", "properties": {"type": {"enum": []}}}


def test_schema_of_a_layer_allows_extends_and_imports_and_demands_nothing():
    layer, whole = schema(Job), schema(Job, partial=False)
    assert {"extends", "imports"} <= set(layer["properties"])
    assert not {"extends", "imports"} & set(whole["properties"])
    assert "required" not in layer["$defs"]["Leaf"]
    assert whole["$defs"]["Leaf"]["required"] == ["name"]


@pytest.mark.parametrize(
    ("value", "good"),
    [
        ({}, True),
        ({"part": {"n": 3}}, True),
        ({"part": {"n": 5}}, False),
        ({"part": {"type": "b", "inner": {}, "must": "x"}}, True),
        ({"part": {"type": "b", "n": 1}}, False),
        ({"part": {"type": "c"}}, False),
        ({"leaves": [{"name": "ab", "kind": "z"}]}, False),
        ({"limit": "none", "pair": [1, False]}, True),
        ({"pair": [1]}, False),
        ({"unknown": 1}, False),
        (plain(Job(part=B(inner=A(), must="x"), leaf=Leaf(name="ab"), limit=None)), True),
    ],
)
@pytest.mark.parametrize("partial", [True, False])
def test_schema_accepts_what_the_loader_accepts(value, good, partial):
    jsonschema = pytest.importorskip("jsonschema")
    assert jsonschema.Draft202012Validator(schema(Job, partial)).is_valid(value) == good
