from pathlib import Path

import pytest
from forge_config import Config, absolute


class Part(Config):
    path_keys = ("path", "more", "where")

    path: str
    more: list[str] | None = None
    where: Path = Path("w")
    name: str = "n"


class Derived(Part):
    path_keys = ("extra",)

    extra: str = ""


class Whole(Config):
    one: Part
    many: list[Part]
    table: dict[str, Part]
    name: str = "n"


def test_absolute_changes_the_path_keys_and_nothing_else() -> None:
    part = Part(path="a/b", more=["c", "/d/*.py"])
    done = Part(path="/x/a/b", more=["/x/c", "/d/*.py"], where=Path("/x/w"))
    whole = Whole(one=part, many=[part, done], table={"t": part})
    assert absolute(whole, Path("/x")) == Whole(one=done, many=[done, done], table={"t": done})
    assert absolute(done, Path("/y")) is done


def test_absolute_knows_the_keys_of_base_structs_and_leaves_empty_names() -> None:
    assert absolute(Derived(path="p"), Path("/x")) == Derived(path="/x/p", where=Path("/x/w"))


def test_path_keys_that_are_no_keys_are_refused() -> None:
    with pytest.raises(TypeError, match="path_keys names"):

        class _(Config):
            path_keys = ("nothing",)
