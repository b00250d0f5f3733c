"""The base of configuration sections: a frozen, strict struct."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, dataclass_transform

import msgspec
from msgspec import Meta as Meta

from forge_config.error import ForgeError

ALL_KEYS = "*"
"""In `free_keys` or `recorded_keys`: every key of the struct, `type` included."""


class ConfigError(ForgeError):
    """A configuration that cannot be used. The message holds every problem found, not only the first."""


class ContradictionError(ConfigError):
    """Keys of one section that do not go together.

    Attributes:
        sentences: what each check says.
    """

    def __init__(self, sentences: Sequence[str]) -> None:
        super().__init__("; ".join(sentences))
        self.sentences = tuple(sentences)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class _ConfigMeta(type(msgspec.Struct)):
    """Makes every subclass frozen, keyword-only and strict (msgspec does not inherit `kw_only`)."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        strict: dict[str, Any] = {"frozen": True, "kw_only": True, "forbid_unknown_fields": True}
        struct: Any = super().__new__(mcls, name, bases, namespace, **(strict | options))
        known = {ALL_KEYS, "type", *struct.__struct_encode_fields__}
        for kind in ("free_keys", "recorded_keys", "path_keys", "growing_keys"):
            if unknown := set(namespace.get(kind, ())) - known:
                raise TypeError(f"{name}.{kind} names {sorted(unknown)}, which are no keys of it")
        return struct


class Config(msgspec.Struct, metaclass=_ConfigMeta):
    """Base of every section: frozen, keyword-only, unknown keys rejected.

    One-field bounds are `Annotated[int, Meta(ge=1)]` (checked when decoded from TOML, not by `__init__`);
    checks over several fields of one section go into `contradictions`, which reports all that it finds. A
    `__post_init__` that raises would report the first only.

    `free_keys` and `recorded_keys` name the keys that may change when something goes on with another
    configuration: freely, or as an event that is written down. All others may not; see `judge`.

    `growing_keys` names the keys of arrays of tables that may get more items at their end, as an event.

    `path_keys` names the keys that hold names of files, so that they can be made absolute; see `absolute`.
    """

    free_keys: ClassVar[tuple[str, ...]] = ()
    recorded_keys: ClassVar[tuple[str, ...]] = ()
    path_keys: ClassVar[tuple[str, ...]] = ()
    growing_keys: ClassVar[tuple[str, ...]] = ()

    def contradictions(self) -> Iterable[str]:
        """A sentence for each pair of keys, or group of them, that do not go together.

        A check must bear what those before it found. For one that raises, see `sentences_from`.
        """
        return ()

    def __post_init__(self) -> None:
        if found := [*self.contradictions()]:
            raise ContradictionError(found)


def sentences_from(check: Callable[..., object], *arguments: Any) -> tuple[str, ...]:
    """The messages of a check that raises `ValueError`, for `Config.contradictions`."""
    try:
        check(*arguments)
    except ValueError as error:
        return sentences_of(error)
    return ()


def sentences_of(error: ValueError) -> tuple[str, ...]:
    """The messages of the checks that raised this error."""
    return error.sentences if isinstance(error, ContradictionError) else (str(error),)
