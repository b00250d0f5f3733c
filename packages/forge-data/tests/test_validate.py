import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from forge_data.cli import main
from forge_data.store.blocks import HashedFile
from forge_data.store.tokens import Manifest, Writer


@pytest.fixture
def store(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    with Writer(tmp_path / "s", 257, "bytes-256", targets=True) as writer:
        for _ in range(200):
            tokens = np.append(draw.integers(0, 256, 500), 256)
            writer.add(tokens, [501], np.ones(501, dtype=bool))
    return tmp_path / "s"


def _byte(name: str) -> Callable[[Path], None]:
    """One bit of a file turns over."""

    def damage(folder: Path) -> None:
        raw = bytearray((folder / name).read_bytes())
        raw[len(raw) // 2] ^= 1
        (folder / name).write_bytes(raw)

    return damage


def _rewritten(name: str, dtype: str, change: Callable[[np.ndarray], None]) -> Callable[[Path], None]:
    """A writer with a mistake: the digests fit what is wrong."""

    def damage(folder: Path) -> None:
        values = np.fromfile(folder / name, dtype)
        change(values)
        file = HashedFile(folder / name)
        file.write(values.tobytes())
        part = file.finish()
        _manifest(**{name.partition(".")[0]: part})(folder)

    return damage


def _manifest(**changes: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        raw = (folder / "manifest.json").read_bytes()
        manifest = msgspec.structs.replace(msgspec.json.decode(raw, type=Manifest), **changes)
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))

    return damage


def _cut(name: str, by: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(raw[:-by] if by > 0 else raw + bytes(-by))

    return damage


def _set(place: int, value: int) -> Callable[[np.ndarray], None]:
    return lambda values: values.__setitem__(place, value)


CORRUPTIONS = {
    "a flipped bit of tokens": (_byte("tokens.bin"), "damaged in block"),
    "a flipped bit of documents": (_byte("docs.idx"), "damaged in block"),
    "a flipped bit of targets": (_byte("targets.bin"), "damaged in block"),
    "a flipped bit of digests": (_byte("tokens.bin.xxh3"), "is not what the manifest says"),
    "no target at all": (_rewritten("targets.bin", "u1", lambda values: values.fill(0)), "is a target"),
    "a file that was cut": (_cut("tokens.bin", 2), "bytes, its manifest says"),
    "a file that grew": (_cut("docs.idx", -8), "bytes, its manifest says"),
    "a missing file": (lambda folder: (folder / "docs.idx").unlink(), "is missing"),
    "a manifest that is no JSON": (_cut("manifest.json", 9), "cannot be read"),
    "another dtype": (_manifest(dtype="uint32"), "contradicts itself"),
    "another count": (_manifest(num_docs=199), "contradicts itself"),
    "an id outside the vocabulary": (
        _rewritten("tokens.bin", "<u2", _set(777, 300)),
        "outside the vocabulary",
    ),
    "documents that do not rise": (_rewritten("docs.idx", "<u8", _set(5, 1)), "does not rise"),
    "a document without its end": (
        _rewritten("tokens.bin", "<u2", _set(500, 7)),
        "does not end with the end",
    ),
    "another tokenizer": (_manifest(tokenizer="other"), "made with tokenizer other"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_validate_finds(name: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(store), "--tokenizer", "bytes"]) == 0
    damage, message = CORRUPTIONS[name]
    damage(store)
    capsys.readouterr()
    assert main(["validate", str(store), "--tokenizer", "bytes"]) == 1
    assert message in capsys.readouterr().out


def test_validate_finds_a_store_given_twice_and_looks_at_all(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(store, store.parent / "copy")
    assert main(["validate", str(store), str(store.parent / "nothing"), str(store.parent / "copy")]) == 1
    intact, missing, copy = capsys.readouterr().out.splitlines()
    assert intact.endswith("intact") and "no token store" in missing and "same documents as" in copy
