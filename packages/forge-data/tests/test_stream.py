import contextlib
import itertools
import json
import pickle
import random
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from forge_data.config import DataConfig, HfTokenizerConfig
from forge_data.error import DataError
from forge_data.loading.loader import Loader, build_loader
from forge_data.order.phases import PhaseConfig
from forge_data.order.skips import SkipConfig
from forge_data.packing.text_stream import TextStream
from forge_data.sources.config import TokensConfig
from forge_data.sources.hf import HfConfig

T, BATCH, EOS = 16, 8, 256


both_formats = pytest.mark.parametrize("folder", ["parquet", "jsonl"], indirect=True)


@pytest.fixture(params=["jsonl"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """120 documents of 1 to 60 letters in 24 parts; the first word of each is its number."""
    draw, made = random.Random(0), tmp_path / "rows"
    made.mkdir()
    rows = [{"text": f"{n} " + "x" * draw.randint(1, 60)} for n in range(120)]
    if request.param == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        for file in range(6):
            table = pyarrow.Table.from_pylist(rows[20 * file : 20 * file + 20])
            parquet.write_table(table, made / f"{file}.parquet", row_group_size=5)
    else:
        for file in range(24):
            lines = [json.dumps(row) + "\n" for row in rows[5 * file : 5 * file + 5]]
            (made / f"{file:02}.jsonl").write_text("".join(lines))
    return made


def _config(folder: Path, source: dict | None = None, **settings: object) -> DataConfig:
    streamed = msgspec.convert(
        {"path": str(folder), "streaming": True, "lanes": 4} | (source or {}), HfConfig, strict=True
    )
    return DataConfig(max_tokens=T, sources=[streamed], **settings)  # type: ignore[arg-type]


def _loaders(config: DataConfig, world_size: int, done: int = 0, state: dict | None = None) -> list[Loader]:
    settings = {"micro_batch": 1, "global_batch": BATCH, "first_sample": done * BATCH, "state": state}
    return [
        build_loader(config, "train", rank=r, world_size=world_size, **settings) for r in range(world_size)
    ]  # type: ignore[arg-type]


def _steps(config: DataConfig, steps: int, world_size: int = 1, done: int = 0, state: dict | None = None):
    """The global batches as tokens, [steps][BATCH][T], and the state that all ranks have behind them."""
    loaders = _loaders(config, world_size, done, state)
    items = [list(itertools.islice(iter(one), steps)) for one in loaders]
    for one in loaders:
        one.close()
    tokens = [
        [micro.inputs["tokens"][0].tolist() for rank in items for micro in rank[step]]
        for step in range(steps)
    ]
    kept = {name: place for one in loaders for name, place in one.state().items()}
    return tokens, json.loads(json.dumps(kept))


def _by_lane(steps: list, lanes: int) -> list[list[int]]:
    """What each lane gave, as one string of tokens."""
    per = BATCH // lanes
    return [
        [t for step in steps for row in step[lane * per : lane * per + per] for t in row]
        for lane in range(lanes)
    ]


def _documents(tokens: list[int]) -> list[str]:
    return bytes(10 if t == EOS else t for t in tokens).decode().split("\n")[:-1]


def _rows_of(folder: Path) -> list[str]:
    if not list(folder.glob("*.parquet")):
        return [
            json.loads(line)["text"] for f in sorted(folder.iterdir()) for line in f.read_text().splitlines()
        ]
    parquet = pytest.importorskip("pyarrow.parquet")
    return [row["text"] for f in sorted(folder.iterdir()) for row in parquet.read_table(f).to_pylist()]


@both_formats
def test_stream_serves_every_document_once_before_any_comes_again(folder: Path) -> None:
    steps, _ = _steps(_config(folder), 80)
    firsts = []
    for tokens in _by_lane(steps, 4):
        said = _documents(tokens)
        size = len(set(said))
        assert len(said) > 2 * size, "the test reads each lane more than twice"
        for start in range(0, len(said) - size, size):
            assert len(set(said[start : start + size])) == size
        assert said[:size] != said[size : 2 * size], "another pass is another order"
        firsts += said[:size]
    assert Counter(firsts) == Counter(_rows_of(folder))
    assert sorted(firsts) != firsts


@both_formats
def test_stream_without_shuffle_reads_the_files_in_their_order(folder: Path) -> None:
    steps, _ = _steps(_config(folder, {"shuffle_parts": 0, "lanes": 1}), 60)
    (tokens,) = _by_lane(steps, 1)
    said = "".join(f"{text}\n" for text in _rows_of(folder) * 3)
    assert bytes(10 if t == EOS else t for t in tokens).decode() == said[: len(tokens)]


def test_stream_goes_on_exactly_after_kills_on_any_number_of_ranks(folder: Path) -> None:
    whole, _ = _steps(_config(folder), 60)
    draw, done, state, served = random.Random(1), 0, {}, []
    while done < 60:
        steps = min(draw.randint(1, 5), 60 - done)
        tokens, state = _steps(_config(folder), steps, draw.choice([1, 2, 4]), done, state)
        served += tokens
        done += steps
    assert served == whole


def test_prefetched_batches_are_not_lost_when_a_stream_goes_on(folder: Path) -> None:
    """A worker is ahead of what was taken; the state is that of the last batch that was."""
    whole, _ = _steps(_config(folder), 40)
    tokens, state = _steps(_config(folder, workers=1), 17)
    more, _ = _steps(_config(folder), 23, 1, 17, state)
    assert tokens + more == whole


def test_stream_in_a_mixture_with_phases_is_the_same_over_ranks_and_kills(folder: Path, make_store) -> None:
    store = TokensConfig(path=str(make_store("a", [100, 228])), name="a", weight=0.6)
    one = _config(folder, {"name": "s", "weight": 0.4})
    phases = [PhaseConfig(start_step=20, weights={"s": 0.9, "a": 0.1})]
    config = msgspec.structs.replace(one, sources=[store, *one.sources], phases=phases, seed=5)
    whole, _ = _steps(config, 40)
    first, state = _steps(config, 23, 4)
    second, state = _steps(config, 9, 1, 23, state)
    third, _ = _steps(config, 8, 2, 32, state)
    assert first + second + third == whole


def test_stream_leaves_out_the_steps_it_is_told_to(folder: Path) -> None:
    """What follows comes earlier, also where a run goes on right before or behind what is left out."""
    whole, _ = _steps(_config(folder), 40)
    skip = [SkipConfig(start_step=5, end_step=9), SkipConfig(start_step=20, end_step=21)]
    rest = whole[:5] + whole[9:24] + whole[25:]
    config = _config(folder, skip=skip)
    for middle in (4, 5, 6, 20):
        first, state = _steps(config, middle, 2)
        second, _ = _steps(config, len(rest) - middle, 4, middle, state)
        assert first + second == rest
    first, state = _steps(_config(folder), 3)
    second, _ = _steps(config, len(rest) - 3, 1, 3, state)
    assert first + second == rest


def test_masks_of_a_stream_are_those_of_a_walk_over_its_tokens(folder: Path) -> None:
    config = _config(folder, mask_documents=True)
    (loader,) = _loaders(config, 1)
    for item in itertools.islice(iter(loader), 20):
        for micro in item:
            row = micro.inputs["tokens"][0].tolist()
            document = place = 0
            for i, token in enumerate(row):
                assert micro.inputs["doc_ids"][0, i] == document
                assert micro.inputs["positions"][0, i] == place
                ends = token == EOS
                assert (micro.inputs["labels"][0, i] == -100) == ends
                document, place = (document + 1, 0) if ends else (document, place + 1)


def test_prompts_of_a_stream_are_no_targets(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text('{"q": "ab", "a": "CD"}\n' * 30)
    config = _config(tmp_path / "rows", {"lanes": 1, "prompt": "q", "completion": "a"})
    (loader,) = _loaders(config, 1)
    for item in itertools.islice(iter(loader), 4):
        for micro in item:
            labels = micro.inputs["labels"][0].tolist()
            assert {ord("a"), ord("b")} & set(labels) == set() and {ord("C"), EOS} <= set(labels)


def test_stream_of_other_files_is_another_one(folder: Path) -> None:
    before = _loaders(_config(folder), 1)[0].fingerprint
    assert _loaders(_config(folder, {"lanes": 2}), 1)[0].fingerprint != before
    assert _loaders(_config(folder), 1)[0].fingerprint == before
    first = sorted(folder.iterdir())[0]
    first.rename(folder / f"z{first.name}")
    assert _loaders(_config(folder), 1)[0].fingerprint != before


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["one two"], tokenizers.trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=alphabet)
    )
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_stream_goes_on_where_the_file_of_its_tokenizer_is_saved_otherwise(
    folder: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(folder, tokenizer=HfTokenizerConfig(path=str(tokenizer_file)))
    with monkeypatch.context() as patch:  # as it was named when its name had the bytes of the file
        patch.setattr(TextStream, "digest", TextStream.file_digest)
        earlier = _loaders(config, 1)[0].fingerprint
    before = _loaders(config, 1)[0]
    assert before.fingerprint != earlier
    before.require(earlier)
    tree = json.loads(tokenizer_file.read_text())
    tokenizer_file.write_text(json.dumps(dict(reversed(tree.items())), indent=7))
    after = _loaders(config, 1)[0]
    after.require(before.fingerprint)
    with pytest.raises(DataError, match="not those the run was trained on"):
        after.require(earlier)
    ids = tree["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    tokenizer_file.write_text(json.dumps(tree))
    with pytest.raises(DataError, match="not those the run was trained on"):
        _loaders(config, 1)[0].require(before.fingerprint)


def test_loader_of_a_stream_begins_anew_with_each_pass(folder: Path) -> None:
    (loader,) = _loaders(_config(folder), 1)
    once, again = ([b[0].inputs["tokens"].tolist() for b in itertools.islice(iter(loader), 5)] for _ in "ab")
    assert once == again
    assert len(pickle.dumps(loader.packings[0])) < 5_000


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ({}, {"packing": "bestfit"}, r'packing = "bestfit" \(a stream is packed by "concat"\)'),
        ({}, {"workers": 2}, "workers = 2 .*1 process"),
        ({}, {"temperature": 2.0}, "temperature"),
        ({}, {"skip": [SkipConfig(samples=[3])]}, "a stream leaves out whole steps"),
        ({"max_epochs": 1.0}, {}, "how long a stream is, is not known"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(folder: Path, source: dict, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(folder, source, **settings)


@pytest.mark.parametrize(
    ("source", "world_size", "message"),
    [
        ({"lanes": 5}, 1, r"lanes = 5 for a stream of 24 parts.*use 1, 2, 4, 8"),
        ({"lanes": 2}, 4, r"stream 0 has 2 lanes, which 4 ranks .*use 1, 2 ranks"),
    ],
)
def test_lanes_that_nobody_can_share_are_named(
    folder: Path, source: dict, world_size: int, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        _loaders(_config(folder, source), world_size)


def test_stream_does_not_go_on_without_its_places(folder: Path) -> None:
    _, state = _steps(_config(folder), 3)
    state.pop("data.0.1")
    with pytest.raises(DataError, match="does not say how far the stream 0 was read"):
        _steps(_config(folder), 1, 1, 3, state)


@both_formats
def test_damaged_file_of_a_stream_is_named(folder: Path) -> None:
    config = _config(folder, workers=1)
    loaders = _loaders(config, 1)
    for file in folder.iterdir():
        file.write_bytes(b"{" + file.read_bytes()[1:40] + b"\n")
    with contextlib.closing(loaders[0]), pytest.raises(DataError, match=str(folder)):
        list(itertools.islice(iter(loaders[0]), 3))


def test_every_lane_of_a_stream_is_read_as_often(folder: Path) -> None:
    """Of one source alone, each lane gives the same number of sequences."""
    _, state = _steps(_config(folder), 30)
    assert sorted(state) == [f"data.0.{lane}" for lane in range(4)]
    windows = np.asarray([place[0] for place in state.values()])
    assert windows.max() - windows.min() <= 2
