"""Data sets of the Hugging Face hub, and files of this machine with the same columns. Imports no torch.

Eager: rows are tokenized once into a store of the cache, by one process of a machine while the others wait.
Streaming: rows are read while training, see `forge_data.packing.text_stream`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from forge_config import Meta
from msgspec import structs

from forge_data.error import DataError
from forge_data.packing.stream import Streamed
from forge_data.packing.text_stream import StreamedText
from forge_data.sources.columns import (
    CHATML,
    OF_TOKENIZER,
    Columns,
    MessagesColumn,
    PromptColumns,
    TextColumn,
)
from forge_data.sources.config import SourceConfig, Split, TextSourceConfig, sources
from forge_data.sources.documents import Task, tasks_of
from forge_data.sources.files import files_of_split, find_files
from forge_data.sources.hub import HubSplit, commit_of, downloaded, files_of, tasks_of_split
from forge_data.store.tokenize import Held


@sources.register("hf")
class HfConfig(TextSourceConfig):
    """A data set of the hub, or a folder or files (.parquet, .arrow, .jsonl, also .gz and .zst).

    Exactly one kind of columns is read: `text`, or `messages`, or `prompt` with `completion`.

    Attributes:
        path: a name on the hub such as `HuggingFaceFW/fineweb-edu`, or a path or pattern of this machine,
            which has precedence where it exists.
        subset: the configuration of a data set of the hub.
        revision: a commit, tag or branch of it; absent is the main branch. A run that streams it keeps the
            commit of its start.
        split: the split of a data set of the hub, or of a folder whose file names tell their splits.
        validation: the path of the validation text, or the name of its split; absent holds out some of
            `path`.
        text: the column with the text; absent means `text` if no other kind is named.
        messages: the column with conversations; only the assistant's messages are targets.
        prompt: the column with prompts, which are no targets.
        completion: the column with the targets.
        template: template of a turn of a conversation, with `{role}` and `{content}`. `tokenizer` uses the
            chat template of the tokenizer.
        roles: further roles of conversations, and whether their messages are targets; beside assistant, whose
            are, and system, developer, user, tool and function, whose are not.
        tools: the column with the tools that the chat template of the tokenizer lists.
        control_tokens: whether a control token that the text of a row spells, such as `<|im_start|>`, is that
            token; absent: yes in texts and prompts, no in conversations.
        streaming: read the text while training, from the hub too, instead of tokenizing it first. Nothing is
            held out: name `validation` to evaluate.
        lanes: for a stream, the number of lanes that its parts (row groups, byte ranges, files) are dealt to;
            ranks share the lanes evenly. 0 takes a divisor of the global batch, at most 64 and one for every
            four parts.
        shuffle_parts: for a stream, the number of parts of a lane whose documents are shuffled together,
            which bounds its memory; 0 reads files in their order.
    """

    free_keys = path_keys = ()

    path: str
    subset: str | None = None
    revision: str | None = None
    split: str = "train"
    validation: str | None = None
    text: str | None = None
    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    template: str = CHATML
    roles: dict[str, bool] = {}
    tools: str | None = None
    control_tokens: bool | None = None
    streaming: bool = False
    lanes: Annotated[int, Meta(ge=0)] = 0
    shuffle_parts: Annotated[int, Meta(ge=0)] = 2

    def contradictions(self) -> Iterator[str]:
        """See `Config.contradictions`."""
        if not self.path or self.validation == "":
            yield (
                f"given path = {self.path!r} and validation = {self.validation!r}; expected a name on the "
                "hub, or a path or pattern of this machine"
            )
        kinds = [self.text, self.messages, self.prompt or self.completion]
        if sum(kind is not None for kind in kinds) > 1 or (self.prompt is None) != (self.completion is None):
            yield (
                f"{self.path}: given text = {self.text!r}, messages = {self.messages!r}, prompt = "
                f"{self.prompt!r}, completion = {self.completion!r}; expected one of text, messages, or "
                "prompt with completion"
            )
        if self.streaming and self.max_epochs is not None:
            yield (
                f"{self.path}: given streaming = true and max_epochs = {self.max_epochs:g}; how "
                "long a stream is, is not known: leave max_epochs out and bound train.steps, or set "
                "streaming = false"
            )
        if "{content}" not in self.template and self.template != OF_TOKENIZER:
            yield (
                f"template = {self.template!r} has no {{content}}; put it where the text goes, or name "
                f"{OF_TOKENIZER!r}"
            )
        if self.tools is not None and (self.messages is None or self.template != OF_TOKENIZER):
            yield (f"given tools = {self.tools!r}; only messages with template = {OF_TOKENIZER!r} list tools")

    def columns(self) -> Columns:
        """See `TextSourceConfig.columns`."""
        if self.messages is not None:
            roles = tuple(sorted(self.roles.items()))
            spelled = self.control_tokens or False
            return MessagesColumn(self.messages, self.template, spelled, roles, self.tools)
        spelled = self.control_tokens is not False
        if self.prompt is not None and self.completion is not None:
            return PromptColumns(self.prompt, self.completion, spelled)
        return TextColumn(self.text or "text", spelled)

    def has_validation(self) -> bool:
        """See `SourceConfig.has_validation`."""
        return (super().has_validation() and not self.streaming) or self.validation is not None

    def held(self, split: Split) -> Held:
        """See `TextSourceConfig.held`."""
        return super().held(split) if self.validation is None else Held()

    def whole(self) -> SourceConfig:
        """See `SourceConfig.whole`; tokenized first, where it was streamed."""
        return structs.replace(self, held_out=0.0, streaming=False)

    def is_streamed(self) -> bool:
        """See `SourceConfig.is_streamed`."""
        return self.streaming

    def pin_stream(self) -> str | None:
        """See `SourceConfig.pin_stream`: the commit of a data set of the hub."""
        if is_local(self.path):
            return None
        return commit_of(HubSplit(self.path, self.subset, self.split), self.revision)

    def open_stream(self, cache: Path, pin: str | None = None) -> Streamed:
        """See `SourceConfig.open_stream`."""
        if is_local(self.path):
            root, files = self.root_and_files("train")
            tasks = tuple(task for file in files for task in self.tasks(file, root))
        else:
            pin = pin or self.pin_stream()
            assert pin is not None
            tasks = tasks_of_split(HubSplit(self.path, self.subset, self.split), pin, cache)
        return self.streamed(tasks=tasks, lanes=self.lanes, shuffle_parts=self.shuffle_parts, pin=pin)

    def tasks(self, file: Path, root: Path) -> list[Task]:
        """Return the parts of a file that can be read alone; names are relative to `root`."""
        return tasks_of(file, root)

    def streamed(self, **dealt: Any) -> Streamed:
        """Return the stream of a source's rows; `dealt` are the fields of any `Streamed`."""
        return StreamedText(columns=self.columns(), **dealt)

    def root_and_files(self, split: Split) -> tuple[Path, list[Path]]:
        """See `TextSourceConfig.root_and_files`."""
        own = self.validation if split == "validation" else None
        if is_local(self.path) and (self.subset is not None or self.revision is not None):
            raise DataError(
                f"{self.path} are files of this machine, given subset = {self.subset!r} and revision = "
                f"{self.revision!r}, which only data sets of the hub have; leave them out"
            )
        if is_local(self.path) or (own is not None and not own.isidentifier() and is_local(own)):
            files = self._local_files(own)
        else:
            asked = HubSplit(self.path, self.subset, own or self.split)
            only = files_of(asked, commit_of(asked, self.revision)) if self.streaming else None
            files = downloaded(asked, self.revision, only)
        return Path(os.path.commonpath([file.parent for file in files])), files

    def _local_files(self, own: str | None) -> list[Path]:
        """Return files of this machine: of the training text, or of `validation`."""
        folder = Path(os.path.realpath(self.path))
        if own is not None and own.isidentifier() and not Path(own).exists() and folder.is_dir():
            return files_of_split(folder, own)
        if own is None and folder.is_dir():
            return files_of_split(folder, self.split)
        if own is None and self.split != "train":
            raise DataError(
                f"given split = {self.split!r} of {self.path}; files are of no split: name those to be read, "
                "or their folder"
            )
        if own is not None and Path(own).is_dir():
            return files_of_split(Path(os.path.realpath(own)), None)
        return find_files([own or self.path])


def is_local(path: str) -> bool:
    """Whether a path stands for files of this machine: it exists, or cannot be a name of the hub."""
    return Path(path).exists() or any(c in path for c in "*?[") or path.startswith(("/", ".", "~"))
