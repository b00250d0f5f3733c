import pytest
from forge_config import Config


class Section(Config):
    size: int = 1


class Child(Section):
    wide: bool = False


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        setattr(Section(), "size", 2)  # noqa: B010 (type checkers refuse the plain form)


@pytest.mark.parametrize("struct", [Section, Child])
def test_config_takes_keywords_only_also_when_inherited(struct):
    with pytest.raises(TypeError):
        struct(3)
    assert struct(size=3).size == 3


def test_configs_of_equal_fields_are_equal():
    assert Child(size=3) == Child(size=3) != Child(size=3, wide=True)
