"""Properties over generated configurations."""

import pytest
import tomli
from forge_config import Config, digest, load, to_toml
from forge_config.lines import key_lines
from forge_config.override import value_of
from forge_config.plain import flat
from forge_config.toml import dumps

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
quick = hypothesis.settings(max_examples=60, deadline=None)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | text
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
trees = st.dictionaries(text, values, max_size=4)


class Leaf(Config):
    a: int | None = None
    b: float = 1.0
    c: str = ""
    d: bool | None = True


class Job(Config):
    leaf: Leaf = Leaf()
    many: list[Leaf]
    named: dict[str, Leaf]


leaves = st.builds(
    Leaf,
    a=st.none() | st.integers(-(2**63), 2**63 - 1),
    b=st.floats(allow_nan=False),
    c=text,
    d=st.none() | st.booleans(),
)
jobs = st.builds(
    Job, leaf=leaves, many=st.lists(leaves, max_size=3), named=st.dictionaries(text, leaves, max_size=3)
)


@quick
@hypothesis.given(trees)
def test_dumps_is_read_back_by_tomli(tree):
    assert tomli.loads(dumps(tree)) == tree


@quick
@hypothesis.given(trees)
def test_key_lines_knows_every_leaf(tree):
    assert set(flat(tree)) <= set(key_lines(dumps(tree)))


@quick
@hypothesis.given(jobs)
def test_resolved_config_loads_to_the_same_value(tmp_path_factory, job):
    path = tmp_path_factory.mktemp("round") / "job.toml"
    path.write_text(to_toml(job), encoding="utf-8", newline="")
    again = load(Job, path).value
    assert again == job and digest(again) == digest(job)


@quick
@hypothesis.given(values)
def test_every_written_value_is_read_back_from_a_flag(value):
    written = dumps({"k": [value, value]}).removeprefix("k = ")
    if written.startswith("["):
        hypothesis.assume("[[k]]" not in written)
        assert value_of(written) == [value, value]
