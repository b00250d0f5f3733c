"""How an open section finds its struct: by the key `type`, in a registry of the package of the interface."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

from forge_config.struct import Config, ConfigError

C = TypeVar("C", bound=Config)
S = TypeVar("S", bound=Config)


class Registry(Generic[C]):
    """The structs that may stand in one open section, by the value of its key `type`.

    A field annotated with `interface` is an open section: the loader reads `type`, looks the struct up here
    and decodes the remaining keys with it. `default` is used when the section is given without `type`.

        optimizers = Registry("optimizer", OptimizerConfig, default="adamw")

        @optimizers.register("adamw")
        class AdamWConfig(OptimizerConfig): ...
    """

    def __init__(self, section: str, interface: type[C], default: str | None = None) -> None:
        self.section = section
        self.interface = interface
        self.default = default
        self._structs: dict[str, type[C]] = {}
        _by_interface[interface] = cast(Registry[Config], self)

    def register(self, type_name: str) -> Callable[[type[S]], type[S]]:
        """Class decorator that adds a struct under `type_name`.

        The same class defined again (a notebook cell, a reloaded module) replaces its older self.

        Raises:
            ConfigError: the name is taken, or the struct is not of the interface of this registry.
        """

        def add(struct: type[S]) -> type[S]:
            unchanged = struct
            taken = self._structs.get(type_name)
            if taken is not None and not _same_source(taken, struct):
                raise ConfigError(
                    f"given {struct.__module__}.{struct.__name__} as {self.section} type {type_name!r}; "
                    f"that is already {taken.__module__}.{taken.__name__}; choose another name"
                )
            if not issubclass(struct, self.interface):
                raise ConfigError(
                    f"given {struct.__name__} as {self.section} type {type_name!r}; expected a subclass of "
                    f"{self.interface.__name__}"
                )
            self._structs[type_name] = struct
            return unchanged

        return add

    def __getitem__(self, type_name: str) -> type[C]:
        return self._structs[type_name]

    def __contains__(self, type_name: object) -> bool:
        return type_name in self._structs

    def __iter__(self) -> Iterator[str]:
        return iter(self._structs)


def _same_source(a: type[Config], b: type[Config]) -> bool:
    return (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__)


_by_interface: dict[type[Config], Registry[Config]] = {}


def registry_of(interface: type[Config]) -> Registry[Config] | None:
    """The registry whose open section is annotated with `interface`, if there is one."""
    return _by_interface.get(interface)


def type_name(struct: type[Config]) -> str | None:
    """The `type` under which a struct is registered anywhere, if it is."""
    for base in struct.__mro__:
        registry = _by_interface.get(base)
        if registry is not None:
            return next((name for name in registry if registry[name] is struct), None)
    return None
