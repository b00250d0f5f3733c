"""Keys of tables of a `config.json`: read, harmless or refused."""

import pytest
from forge_model import ModelError
from forge_model.hf.keys import Keys, keyed


def test_texts_of_keys_have_types_defaults_and_those_that_may_be_absent():
    found = keyed("size=3 act='gelu' eps=1e-5 layers=[1,2] tied=False shapes:list")
    assert {name: key.kind for name, key in found.items()} == {
        "size": int, "act": str, "eps": float, "layers": list, "tied": bool, "shapes": list
    }  # fmt: skip
    assert found["layers"].default == [1, 2] and found["shapes"].default is None
    assert found["shapes"].accepts(None) and not found["size"].accepts(None) and not found["size"].accepts(0)


def test_keys_that_are_not_known_or_have_other_values_are_listed_together():
    keys = Keys("one", keyed("size=3 shapes:list"), {"dropout": 0}, ["colour"])
    assert keys.full({"colour": 1, "dropout": None, "num_beams": 2, "shapes": [1]}) == {
        "size": 3,
        "shapes": [1],
    }
    with pytest.raises(
        ModelError, match=r"a one .* size = 'x', expected int; dropout = 1, only 0 .*; odd = 2 is"
    ):
        keys.full({"size": "x", "dropout": 1, "odd": 2})
