import json
import sys
import types
from pathlib import Path

import msgspec
import numpy as np
import pytest
from forge_data.config import DataConfig
from forge_data.error import DataError
from forge_data.loading.loader import build_loader
from forge_data.sources.columns import MessagesColumn
from forge_data.sources.hf import HfConfig
from forge_data.store.tokens import TokenStore
from forge_data.tokenizer.tokenizer import BytesConfig

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "So?"},
    {"role": "assistant", "content": "five"},
]


def _source(**values: object) -> HfConfig:
    return msgspec.convert({"held_out": 0.0} | values, HfConfig, strict=True)


def _rows(folder: Path, rows: list[dict]) -> str:
    folder.mkdir()
    (folder / "part-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def _targets(config: HfConfig, tmp_path: Path, **settings: object) -> str:
    """What a model is trained to say, `|` where something else was left out."""
    data = DataConfig(max_tokens=16, sources=[config], cache_dir=str(tmp_path / "cache"), **settings)  # type: ignore[arg-type]
    loader = build_loader(data, "train", micro_batch=1, global_batch=1)
    packing = loader.packings[0]
    said = b""
    for sample in range(len(packing)):
        read = packing.read(np.asarray([sample]))
        labels = read.tokens[0, 1:].astype(np.int64)
        labels[read.ignored[1]] = -100
        said += b"".join(b"|" if t < 0 else b"." if t == 256 else bytes([t]) for t in labels.tolist())
    return "|".join(part for part in said.decode().split("|") if part)


@pytest.mark.parametrize("packing", ["concat", "bestfit"])
def test_only_what_the_assistant_says_is_a_target(tmp_path: Path, packing: str) -> None:
    path = _rows(tmp_path / "chat", [{"messages": CHAT}])
    said = _targets(_source(path=path, messages="messages"), tmp_path, packing=packing).replace("|", "")
    assert said == "4<|im_end|>\nfive<|im_end|>\n.".replace("|", "")


def test_chat_is_written_as_the_template_says(tmp_path: Path) -> None:
    column = MessagesColumn(template="[{role}] {content} [/{role}]")
    document = column.document({"messages": CHAT[1:3]}, BytesConfig().build())
    assert document.text == "[user] 2+2? [/user][assistant] 4 [/assistant]"
    assert [document.text[a:b] for a, b in document.targets or ()] == ["4 [/assistant]"]


def test_prompts_are_no_targets(tmp_path: Path) -> None:
    path = _rows(tmp_path / "pairs", [{"q": "What is this?", "a": "ab"}, {"q": "And?", "a": "cd"}])
    assert _targets(_source(path=path, prompt="q", completion="a"), tmp_path) == "ab.|cd."


def test_store_with_targets_is_another_one_and_is_verified(tmp_path: Path) -> None:
    path = _rows(tmp_path / "pairs", [{"text": "What", "a": "ab"}])
    pairs = _source(path=path, prompt="text", completion="a").open("train", BytesConfig(), tmp_path)
    plain = _source(path=path).open("train", BytesConfig(), tmp_path)
    assert pairs.folder != plain.folder and plain.manifest.targets is None
    (pairs.folder / "targets.bin").write_bytes(b"\1" * len(pairs))
    with pytest.raises(DataError, match=r"targets.bin is damaged in block 0"):
        TokenStore(pairs.folder).verify()


def test_source_without_any_target_is_refused(tmp_path: Path) -> None:
    chat = _source(path=_rows(tmp_path / "chat", [{"messages": CHAT[:2]}]), messages="messages")
    data = DataConfig(max_tokens=8, sources=[chat], cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"source 0: no token of .* is a target"):
        build_loader(data, "train", micro_batch=1, global_batch=1)


def test_stream_without_any_target_is_refused(tmp_path: Path) -> None:
    path = _rows(tmp_path / "chat", [{"messages": CHAT[:2]}] * 3)
    stream = _source(path=path, messages="messages", streaming=True)
    data = DataConfig(max_tokens=8, sources=[stream], cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"no document of .* has a target"):
        next(iter(build_loader(data, "train", micro_batch=1, global_batch=1)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hello"}, r"part-0.jsonl at 0: 'messages' holds str, not a list of messages"),
        ({"messages": [{"role": "user"}]}, "under 'content'; it has role"),
        ({"text": "x", "id": 3}, r"no row with messages under 'messages'; it has text, id"),
    ],
)
def test_rows_that_are_no_conversation_are_named(tmp_path: Path, row: dict, message: str) -> None:
    source = _source(path=_rows(tmp_path / "chat", [row]), messages="messages")
    with pytest.raises(DataError, match=message):
        source.open("train", BytesConfig(), tmp_path)


@pytest.mark.parametrize(
    "columns", [{"text": "a", "messages": "b"}, {"prompt": "a"}, {"completion": "a"}, {"template": "{role}"}]
)
def test_columns_that_contradict_are_refused(columns: dict[str, str]) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"expected one of text, messages, or|has no {content}"):
        _source(path="x", **columns)


def _hub(monkeypatch: pytest.MonkeyPatch, load_dataset: object) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_hub_that_cannot_be_reached_names_what_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the hub")

    _hub(monkeypatch, unreachable)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "datasets" / "allenai___c4").mkdir(parents=True)
    (tmp_path / "hub" / "datasets--roneneldan--TinyStories").mkdir(parents=True)
    with pytest.raises(
        DataError, match=r"(?s)some/set.*reach.*allenai/c4, roneneldan/TinyStories.*local files"
    ):
        _source(path="some/set").open("train", BytesConfig(), tmp_path)


def test_data_set_of_the_hub_is_read_from_its_arrow_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    table = pyarrow.table({"text": ["one", "two"]})
    with ipc.new_stream(str(tmp_path / "set-train.arrow"), table.schema) as writer:
        writer.write_table(table)
    asked = []

    def load(path: str, subset: str | None, split: str) -> object:
        asked.append((path, subset, split))
        return types.SimpleNamespace(cache_files=[{"filename": str(tmp_path / "set-train.arrow")}])

    _hub(monkeypatch, load)
    store = _source(path="some/set", subset="en").open("train", BytesConfig(), tmp_path)
    assert len(store) == 8 and asked == [("some/set", "en", "train")]
