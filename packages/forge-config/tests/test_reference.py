from typing import Annotated, Literal

from forge_config import Config, Meta, Registry, reference_markdown


class Part(Config):
    """A part of something."""


parts = Registry("part", Part, default="a")


@parts.register("a")
class A(Part):
    """The first.

    Attributes:
        n: how many | how much.
    """

    n: Annotated[int, Meta(ge=1)] = 1


@parts.register("b")
class B(Part):
    """The second."""

    inner: Part = A()


class Source(Config):
    """Where from."""

    path: str
    kind: Literal["x", "y"] = "x"


class Data(Config):
    """The data."""

    rate: float | None = None
    sources: list[Source] = []


class Job(Config):
    """A job."""

    seed: int = 0
    data: Data
    part: Part = A()
    parts: dict[str, Part] = {}


def test_reference_markdown_is_a_page_of_tables():
    page = reference_markdown(Job)
    assert page.startswith("# Configuration reference\n")
    for line in (
        "| `seed` | integer | `0` |  |",
        "## `[data]`",
        "| `rate` | number | absent |  |",
        "| `sources` | array of table | `[]` | See `[[data.sources]]`. |",
        "### `[[data.sources]]`",
        "| `path` | string |  |  |",
        '| `kind` | "x" or "y" | `"x"` |  |',
        "A part of something. One of: `a`, `b`.",
        '### `[part]` with `type = "a"` (default)',
        "| `n` | integer >= 1 | `1` | how many \\| how much. |",
        '| `inner` | table | `type = "a"` |  |',
        "## `[parts.NAME]`",
    ):
        assert f"{line}\n" in page, line


def test_reference_markdown_writes_a_part_inside_itself_once():
    assert "part.inner" not in reference_markdown(Job)


def test_reference_markdown_tables_have_four_cells():
    rows = [line for line in reference_markdown(Job).splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {5}
