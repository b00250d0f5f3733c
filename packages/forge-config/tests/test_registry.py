import pytest
from forge_config import Config, ConfigError, Registry, registry_of


class Interface(Config):
    pass


def test_registry_is_found_by_its_interface():
    registry = Registry("thing", Interface)
    assert registry_of(Interface) is registry
    assert registry_of(Config) is None


def test_register_refuses_a_taken_name():
    registry = Registry("thing", Interface)

    @registry.register("a")
    class A(Interface):
        pass

    with pytest.raises(ConfigError, match=r"'a'; that is already .*\.A; choose another name"):

        @registry.register("a")
        class B(Interface):
            pass

    assert registry["a"] is A


def test_register_replaces_the_same_class_defined_again():
    registry = Registry("thing", Interface)

    def define():
        @registry.register("a")
        class A(Interface):
            pass

        return A

    older, newer = define(), define()
    assert registry["a"] is newer is not older
    assert list(registry) == ["a"]


def test_register_refuses_a_struct_of_another_interface():
    class Other(Config):
        pass

    with pytest.raises(ConfigError, match="expected a subclass of Interface"):
        Registry("thing", Interface).register("a")(Other)
