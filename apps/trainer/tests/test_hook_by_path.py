"""A hook that is named by its class: what is said where it cannot be built."""

import sys
from types import ModuleType

import pytest
from forge_config import ConfigError
from forge_trainer.hooks import ClassHookConfig, Hook


class Plain(Hook):
    """Takes nothing, not even the run."""


@pytest.mark.parametrize(
    ("options", "init"),
    [
        ({}, "write def __init__(self, run), the keys"),
        ({"path": "x"}, "write def __init__(self, run, path), the"),
    ],
)
def test_hook_without_init_is_told_the_one_it_needs(monkeypatch, options, init):
    module = ModuleType("lab_hooks")
    module.Plain = Plain
    monkeypatch.setitem(sys.modules, "lab_hooks", module)
    with pytest.raises(ConfigError) as error:
        ClassHookConfig(path="lab_hooks:Plain", options=options).build(None)
    assert init in str(error.value) and "Plain(run" in str(error.value)
    assert "(run, )" not in str(error.value)
