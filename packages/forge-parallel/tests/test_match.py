import pytest
from forge_parallel.error import ParallelError
from forge_parallel.match import PassThrough, find, matches
from torch import nn


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("layers.*", "layers.10", True),
        ("layers.*", "layers.1.ffn", False),
        ("layers.*", "layers", False),
        ("layers.*.ffn.w_*", "layers.3.ffn.w_up", True),
        ("layers.*.ffn.w_*", "layers.3.ffn.x_up", False),
        ("*.norm", "deep.er.norm", False),
    ],
)
def test_matches_stars_for_one_component(pattern, name, fits):
    assert matches(pattern, name) is fits


def test_find_keeps_the_order_of_the_model():
    model = nn.ModuleList(nn.Identity() for _ in range(12))
    assert list(find(model, "*")) == [str(i) for i in range(12)]


def test_find_of_the_empty_pattern_is_the_model():
    model = nn.ModuleList([nn.Identity()])
    assert find(model, "") == {"": model}


@pytest.mark.parametrize(
    ("pattern", "is_found"),
    [
        ("tower", True),
        ("tower.blocks.*", True),
        ("*.norm", True),
        ("towers.blocks.*", False),
        ("head.norm", False),
    ],
)
def test_find_of_a_pattern_inside_of_what_another_stage_has_is_nothing(pattern, is_found):
    model = nn.ModuleDict({"tower": PassThrough(), "head": nn.Identity()})
    if is_found:
        assert find(model, pattern) == {}
    else:
        with pytest.raises(ParallelError, match="names no module"):
            find(model, pattern)


def test_find_lists_the_names_there_are():
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Identity(), nn.Identity()])})
    with pytest.raises(
        ParallelError, match=r"'layers\.\*' names no module of ModuleDict; it has blocks, blocks\.\*"
    ):
        find(model, "layers.*")
