import pytest
from forge_config.keys import inside, item, join, parent


@pytest.mark.parametrize("name", ["plain", "odd name", "a.b", 'quo"te', "", "brack[0]et", "\\"])
def test_parent_undoes_join(name):
    assert parent(join("a.b", name)) == "a.b"
    assert parent(join("", name)) == ""


def test_parent_undoes_item():
    assert parent(item("a.b", 12)) == "a.b"


def test_inside_takes_whole_names():
    assert inside("a.b", "a") and inside("a[0].c", "a")
    assert not inside("ab", "a") and not inside("a", "a")
