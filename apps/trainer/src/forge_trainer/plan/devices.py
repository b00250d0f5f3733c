"""The speed and memory of devices and their networks: a table in TOML. Imports no torch."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from forge_config import ConfigError
from msgspec import Meta

TABLE = Path(__file__).with_name("devices.toml")
TABLE_HERE = "FORGE_DEVICE_TABLE"
"""The environment variable with the file of this site's devices, used without `--device-table`."""

CPU = "cpu"
"""The only device outside the table: its speed and memory are unknown."""

Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Peak rates and memory of a device; see `devices.toml` for units."""

    memory_gib: Positive
    tflops: dict[str, Positive]
    memory_gbs: Positive
    inside_gbs: Positive
    between_gbs: Positive
    node_ranks: Annotated[int, Meta(ge=1)] = 8
    switched: bool = True
    watts: Annotated[float, Meta(ge=0)] = 0.0
    storage_gbs: Positive = 2.0
    latency_us: tuple[Positive, Positive] = (10.0, 25.0)
    launch_us: Positive = 6.0


class Efficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fractions of the peak rates that a step reaches; see `devices.toml`."""

    matmul: Share
    attention: Share
    memory: Share
    network: Share
    fused: Share
    overlap: Share


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table of devices by name, with the efficiency of a step."""

    devices: dict[str, Device]
    efficiency: Efficiency


def load_table(extra: Path | str | None = None) -> Table:
    """Load the table of Forge, with additions and changes from a file.

    Args:
        extra: a file of the same form; keys of a known device that it does not name stay. Default the file
            in `FORGE_DEVICE_TABLE`, if set.

    Raises:
        ConfigError: the file cannot be read, or a device lacks a key, or has an unknown key.
    """
    found = tomllib.loads(TABLE.read_text())
    extra = extra or os.environ.get(TABLE_HERE) or None
    if extra is not None:
        try:
            found = _over(found, tomllib.loads(Path(extra).read_text()))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"the device table {extra} cannot be read: {error}") from None
    try:
        return msgspec.convert(found, Table)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{extra}: {error}; see {TABLE} for what a device needs") from None


def device_of(table: Table, name: str) -> Device | None:
    """Return a device by its name; None for `cpu`.

    Raises:
        ConfigError: the table has no such device.
    """
    if name == CPU:
        return None
    if name not in table.devices:
        raise ConfigError(
            f"--device={name}: expected one of {', '.join([*table.devices, CPU])}; another one is described "
            "by --device-table FILE"
        )
    return table.devices[name]


def name_of_gpu(name: str) -> str | None:
    """Return the table's device for a name of torch, such as `NVIDIA H100 80GB HBM3`; None if there is none.

    Parts of a GPU (MIG), the H100 NVL of 94 GB and Grace superchips have a different memory from the table.
    """
    words = name.lower()
    if any(other in words for other in (" mig ", "nvl", "gh200", "gb200")):
        return None
    if "a100" in words:
        return "a100-40gb" if "40gb" in words else "a100"
    return next((name for name in ("b200", "h200", "h100") if name in words), None)


def _over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees; values of `upper` win."""
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        merged[key] = _over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
