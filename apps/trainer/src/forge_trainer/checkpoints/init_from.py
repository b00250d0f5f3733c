"""Finds the weights that a run starts from, and selects tensors that fit its model. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from forge_ckpt import manifest
from forge_ckpt.error import CheckpointError
from forge_ckpt.folders import Folders
from forge_config import Config, ConfigError, plain
from forge_config.load import load_sections
from forge_config.plain import flat
from forge_model.config import ModelConfig
from forge_model.decoder.compare import differences
from forge_model.decoder.config import DecoderConfig
from forge_model.error import ModelError
from forge_model.hf.config import config_from_hf, read_config
from forge_model.hf.families import FAMILIES
from msgspec import structs

from forge_trainer.config.train import TrainConfig
from forge_trainer.optim.groups import inside

if TYPE_CHECKING:
    from forge_model.hf.checkpoint import HuggingFace

Shapes = Mapping[str, tuple[int, ...]]


class _Model(Config):
    model: ModelConfig


class Origin(NamedTuple):
    """The origin of initial weights.

    Attributes:
        name: name of the origin in the configuration.
        folder: folder of Hugging Face weights, or of one checkpoint.
        is_checkpoint: whether the folder is a checkpoint.
        prefix: name prefix of the model's weights that come from this origin; "" stands for all weights.
    """

    name: str
    folder: Path
    is_checkpoint: bool
    prefix: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether the weights have Forge names: a checkpoint, or a folder with the `config.toml` of a run."""
        return self.is_checkpoint or (self.folder / "config.toml").exists()

    def model(self) -> ModelConfig | None:
        """Return the model of the weights; None if no file beside them names it. Imports nothing.

        Raises:
            ConfigError, ModelError: the file that describes the model cannot be read.
        """
        if not self.is_ours:
            return self._decoder()
        from forge_trainer.run_dir.files import RunFiles, read_outline

        run = self.folder.parent.parent if self.is_checkpoint else self.folder
        if not RunFiles(run).config.exists():
            return None
        try:
            return load_sections(_Model, RunFiles(run).config).model
        except ConfigError as error:
            imports = ", ".join(read_outline(run).imports)
            hint = (
                f"\n{run} imports {imports}, which is not done here: name them in `imports` if you trust them"
            )
            raise ConfigError(f"{error}{hint if imports else ''}") from None

    def _decoder(self) -> ModelConfig | None:
        if not (self.folder / "config.json").exists():
            return None
        hf = read_config(self.folder)
        known = any(family.model_type == hf.get("model_type") for family in FAMILIES)
        return config_from_hf(hf) if known else None


def origin_of(name: str) -> Origin:
    """Find what `train.init_from` names: a folder of Hugging Face weights, or the checkpoint of a step.

    Args:
        name: a folder of weights; `RUN@STEP`, where RUN is the directory of a run or of its checkpoints; or
            the folder of a checkpoint.

    Raises:
        CheckpointError: there is no such step, or a run is named without one.
    """
    path = Path(name)
    if (path / manifest.NAME).exists():
        return Origin(name, path, True)
    if path.is_dir():
        if steps := _folders(path).steps():
            raise CheckpointError(f"given {name}, a run; say of which step: {name}@{steps[-1]}")
        return Origin(name, path, False)
    run, at, step = name.rpartition("@")
    if not at:
        return Origin(name, path, False)
    folders = _folders(Path(run))
    has = folders.steps()
    if not step.isdecimal() or int(step) not in has:
        raise CheckpointError(f"there is no {name}; {run} has steps {', '.join(map(str, has)) or 'none'}")
    return Origin(name, folders.of(int(step)), True)


def _folders(run: Path) -> Folders:
    inner = run / "checkpoints"
    return Folders(inner if inner.is_dir() else run)


def require_origins(model: ModelConfig, train: TrainConfig) -> list[Origin]:
    """Find the weights that a run starts from; check that they are of its model unless it takes parts.

    Raises:
        CheckpointError: there is no such checkpoint.
        ModelError: the weights belong to another model, or the file that describes it cannot be read.
        ConfigError: the weights belong to another model (lists every difference); or the model has no
            weights with such a prefix, or no Hugging Face form.
    """
    found = [origin_of(name)._replace(prefix=prefix) for prefix, name in train.origins.items()]
    for origin in found:
        if not train.init_in_parts:
            _require(model, origin)
    return found


def part_of(model: ModelConfig, prefix: str) -> ModelConfig:
    """Return the part of a model whose names begin with a prefix; the whole model for an empty prefix.

    Raises:
        ConfigError: the model has no such part.
    """
    if not prefix:
        return model
    for name, part in (seeds := model.seeds()).items():
        if prefix == name or prefix.startswith(f"{name}."):
            return part_of(part, prefix[len(name) + 1 :])
    known = ", ".join(seeds) or "none: give train.init_from one place, as text"
    raise ConfigError(
        f"train.init_from names {prefix!r}; the parts of this {type(model).__name__} are {known}. Weights of "
        "any prefix may come from a checkpoint of a model of the same type"
    )


def is_of_the_whole(model: ModelConfig, origin: Origin) -> bool:
    """Return whether an origin with a prefix holds a whole model of the same type as `model`."""
    return bool(origin.prefix) and origin.is_ours and type(origin.model()) is type(model)


def _require(model: ModelConfig, origin: Origin) -> None:
    """Check that weights were made for the part of the model that is to load them."""
    other = origin.model() if origin.is_ours else None
    if other is not None and is_of_the_whole(model, origin):
        if origin.prefix not in model.parts():
            return  # names and sizes of its tensors are compared later
        model, other = model.parts()[origin.prefix], other.parts()[origin.prefix]
    else:
        model = part_of(model, origin.prefix)
    if not origin.is_ours:
        if (origin.folder / "config.json").exists():
            form_of(model, origin.name).require(read_config(origin.folder), origin.name)
    elif found := unlike(model, other):
        listed = "".join(f"\n  {line}" for line in found)
        raise ConfigError(
            f"{origin.name} has weights of another model than [model] describes:{listed}\nChange "
            "these keys, or say which tensors to take: train.init_include, init_exclude, init_resize."
        )


def form_of(model: ModelConfig, place: str) -> HuggingFace:
    """Return the conversion of a model to Hugging Face and back.

    Raises:
        ModelError: the model has no such conversion; the message names `place`.
    """
    if (form := model.hugging_face()) is None:
        raise ModelError(
            f"{place}: a {type(model).__name__} has no form in Hugging Face (its `hugging_face` gives none)"
        )
    return form


def unlike(model: ModelConfig, other: ModelConfig | None) -> list[str]:
    """List the differences of two models, one line each; none if the other model is unknown."""
    if other is None:
        return []
    if isinstance(model, DecoderConfig) and isinstance(other, DecoderConfig):
        return differences(model, other)
    if type(model) is not type(other):
        return [f"another type, {type(other).__name__}"]
    parts, theirs = model.parts(), other.parts()
    if parts.keys() != theirs.keys():
        return [f"parts {', '.join(parts)}, there {', '.join(theirs)}"]
    lines = [f"{name}.{line}" for name, part in parts.items() for line in unlike(part, theirs[name])]
    mine, its = (_outside(one) for one in (model, other))
    return lines + [
        f"{key}: {mine.get(key, 'absent')!r}, there {its.get(key, 'absent')!r}"
        for key in {**mine, **its}
        if mine.get(key) != its.get(key)
    ]


def _outside(model: ModelConfig) -> dict[str, Any]:
    """Return the flat keys of a model, without free keys and keys of models inside it."""
    inner = {*model.free_keys} | {
        field.encode_name
        for field in structs.fields(model)
        if isinstance(getattr(model, field.name), ModelConfig)
    }
    return {key: value for key, value in flat(plain(model)).items() if key.split(".")[0] not in inner}


class Chosen(NamedTuple):
    """The selection of tensors to load.

    Attributes:
        taken: names of tensors that are loaded whole.
        resized: names of tensors of other sizes, whose common part is loaded.
        random: names of tensors of the model that keep their random values.
        unused: names of tensors of the origin that are not loaded.
    """

    taken: Sequence[str]
    resized: Sequence[str]
    random: Sequence[str]
    unused: Sequence[str]

    def lines(self, ours: Shapes, theirs: Shapes, name: str, seed: int) -> Iterator[str]:
        """Yield lines that list the loaded, the random and the unused tensors."""
        yield f"{len(self.taken) + len(self.resized)} of {len(ours)} tensors are those of {name}"
        for key in self.resized:
            yield f"  in part    {key}: {list(theirs[key])} there, {list(ours[key])} here"
        for kind, keys in ((f"seed {seed}", self.random), ("not taken", self.unused)):
            yield from (f"  {kind:<10} {line}" for line in grouped(keys))


def grouped(names: Iterable[str]) -> list[str]:
    """List names; names that differ only in their numbers share one line, with their count."""
    found = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    return [
        name if number == 1 and "*" not in name else f"{name} ({number})" for name, number in found.items()
    ]


def choose(ours: Shapes, theirs: Shapes, train: TrainConfig, new: Collection[str] = ()) -> Chosen:
    """Select the tensors that a model loads from its origins.

    Args:
        ours: shapes of the tensors of the model, by name.
        theirs: shapes of the tensors of the origins, by name.
        train: the section with the patterns.
        new: names of tensors of the model that have no origin, and need not be in `theirs`.

    Raises:
        CheckpointError: a pattern names nothing, or a selected tensor does not fit; lists all of them.
    """
    names = sorted({*ours, *theirs})
    patterns = (*train.init_include, *train.init_exclude, *train.init_resize)
    if idle := [one for one in patterns if not any(inside(one, name) for name in names)]:
        raise CheckpointError(
            f"patterns of train.init_* that name no tensor: {', '.join(idle)}; there are "
            f"{', '.join(grouped(names)[:20])}"
        )
    wanted = [name for name in names if any(not p or name.startswith(f"{p}.") for p in train.origins)]
    wanted = [name for name in wanted if not train.init_include or _any(train.init_include, name)]
    wanted = [name for name in wanted if not _any(train.init_exclude, name)]
    wanted = [name for name in wanted if name in theirs or name not in new]
    resized = [
        name
        for name in wanted
        if _any(train.init_resize, name)
        and name in ours
        and name in theirs
        and ours[name] != theirs[name]
        and len(ours[name]) == len(theirs[name])
    ]
    named = " and ".join(train.origins.values())
    wrong = [*_misfits([name for name in wanted if name not in resized], ours, theirs)]
    if wrong:
        listed = "".join(f"\n  {line}" for line in wrong[:20])
        raise CheckpointError(
            f"{named} does not fit the model ({len(wrong)}):{listed}\nName what is not to be taken "
            "in train.init_exclude, and what may differ in size in train.init_resize."
        )
    if not wanted:
        raise CheckpointError(
            f"train.init_include and init_exclude leave nothing of {named}; leave out "
            "train.init_from if all of the model is to be random"
        )
    used = {*wanted}
    return Chosen(
        [name for name in wanted if name not in resized],
        resized,
        [name for name in names if name in ours and name not in used],
        [name for name in names if name in theirs and name not in used],
    )


def _any(patterns: Iterable[str], name: str) -> bool:
    return any(inside(pattern, name) for pattern in patterns)


def _misfits(wanted: Sequence[str], ours: Shapes, theirs: Shapes) -> Iterator[str]:
    for name in wanted:
        if name not in theirs:
            yield f"{name} is not there"
        elif name not in ours:
            yield f"{name} is there, and not in the model"
        elif ours[name] != theirs[name]:
            yield f"{name} is {list(theirs[name])} there, {list(ours[name])} here"
