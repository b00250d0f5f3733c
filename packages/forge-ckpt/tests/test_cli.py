"""What `forge-ckpt` tells of good, bad and odd folders, and how it ends: without a traceback."""

import errno
import json
import os
import subprocess
import sys

import pytest
import torch
from forge_ckpt import Snapshot, Store
from forge_ckpt import manifest as manifests
from forge_ckpt.cli import main
from forge_ckpt.lease import take


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "run" / "checkpoints", keep=9)
    for step in (1, 2, 3):
        store.save(step, Snapshot({"model.w": torch.full((4,), float(step))}))
    return store


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def rows(capsys, *arguments):
    code = main([*map(str, arguments), "--json"])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_fsck_of_a_good_folder_finds_nothing(store, capsys):
    code, told = rows(capsys, "fsck", store.root.parent)
    assert code == 0
    assert [one["state"] for one in told if one["what"] == "checkpoint"] == ["intact"] * 3
    assert {one["what"]: one["state"] for one in told} == {
        "checkpoint": "intact",
        "progress": "reached",
        "lease": "none",
        "verdict": "all checkpoints are intact",
    }
    assert main(["fsck", str(store.root)]) == 0
    assert "verdict  all checkpoints are intact" in capsys.readouterr().out


def test_fsck_tells_damage_leftovers_pins_links_and_odd_names(store, capsys):
    flip(store.folder(3) / "rank-00000.bin")
    for name in (".tmp-0-000000009-x", ".bad-000000002-x", "step-4", "a\nb\x1b[2J"):
        (store.root / name).mkdir()
    (store.root / ".bad-000000002-x" / "rank-00000.bin").write_bytes(bytes(2_000_000))
    (store.root / "pin-000000007").touch()
    (store.root / "step-000000005").symlink_to(store.folder(1))
    code, told = rows(capsys, "fsck", store.root)
    assert code == 1
    states = {(one["what"], one.get("step", one.get("name"))): one["state"] for one in told}
    assert states["checkpoint", 3] == states["checkpoint", 5] == "damaged"
    assert states["leftover", ".tmp-0-000000009-x"] == "tmp" and states["pin", 7] == "dangling"
    assert states["odd", "step-4"] == states["odd", "a\nb\x1b[2J"] == "unknown"
    assert states["progress", 3] == "behind"
    assert next(one["MB"] for one in told if one.get("state") == "bad") == 2.0
    assert "is a link to" in next(one["why"] for one in told if one.get("step") == 5)
    assert told[-1]["intact"] == [1, 2] and told[-1]["code"] == 1
    main(["fsck", str(store.root)])
    assert "\x1b" not in capsys.readouterr().out


def test_fsck_tells_who_holds_the_lease_and_that_a_save_is_on(store, capsys):
    (store.root / ".tmp-1-000000009-x").mkdir()
    lease = take(store.root.parent / "lease")
    try:
        _, told = rows(capsys, "fsck", store.root.parent)
    finally:
        lease.release()
    states = {one["what"]: one for one in told}
    assert states["lease"]["state"] == "held" and str(os.getpid()) in states["lease"]["why"]
    assert states["leftover"]["state"] == "busy"
    assert rows(capsys, "fsck", store.root.parent)[1][-2]["state"] == "free"


def test_fsck_of_what_is_lost_or_cannot_be_read_says_so(store, tmp_path, capsys):
    newest = store.folder(3) / "manifest.json"
    for step in (1, 2):
        store.remove(step)
    body = newest.read_bytes().partition(b"\n")[2].replace(b'"format":2', b'"format":9')
    from forge_ckpt.manifest import digest

    newest.write_bytes(digest(body).hex().encode() + b"\n" + body)
    assert rows(capsys, "fsck", store.root)[0] == 2
    store.remove(3)
    code, told = rows(capsys, "fsck", store.root)
    assert code == 1 and told[0]["state"] == "lost"


@pytest.mark.parametrize("command", ["ls", "verify"])
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_checkpoints_that_are_all_gone_are_not_well(store, capsys, command, more):
    for step in (1, 2, 3):
        store.remove(step)
    assert main([command, str(store.root.parent), *more]) == 1
    assert "once held step 3" in capsys.readouterr().err


def test_nothing_is_verified_where_no_checkpoint_ever_was(tmp_path, capsys):
    for command, code in (("verify", 2), ("ls", 0)):
        assert main([command, str(tmp_path)]) == code
        assert "there is no checkpoint in" in capsys.readouterr().err
    code, told = rows(capsys, "fsck", tmp_path)
    assert code == 0 and told[-1]["state"] == "there are no checkpoints"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_progress_that_is_no_file_neither_hangs_nor_ends_fsck(store, make):
    (store.root / "PROGRESS").unlink()
    make(store.root / "PROGRESS")
    command = "import sys; from forge_ckpt.cli import main; sys.exit(main())"
    line = [sys.executable, "-c", command, "fsck", str(store.root), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=20)
    told = [json.loads(one) for one in done.stdout.splitlines()]
    assert done.returncode == 0 and told[-1]["intact"] == [1, 2, 3], done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["ls", "none"], 2),
        (["fsck", "file"], 2),
        (["show", "run", "--step", "9"], 1),
        (["verify", "run", "--step", "9"], 1),
        (["show", "empty"], 2),
        (["export", "run", "file"], 2),
        (["export", "run", "file/below"], 2),
        (["diff", "run", "none"], 2),
        (["diff", "run/checkpoints/step-000000001", "run/checkpoints/step-000000002"], 1),
        (["pin", "run", "9"], 2),
        (["unpin", "run", "1"], 2),
        (["prune", "run", "--keep", "0"], 2),
        (["ls", "a\x00b"], 2),
        (["ls", "x" * 300], 2),
        (["ls", "loop"], 2),
    ],
)
def test_bad_input_ends_with_a_message_and_the_code_that_is_documented(
    store, tmp_path, monkeypatch, capsys, arguments, code
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for more in ([], ["--json"]):
        assert main([*arguments, *more]) == code
        told = capsys.readouterr()
        assert told.err or told.out


@pytest.mark.parametrize("step", ["-1", "x", "1e3", "9" * 40, "²"])
def test_what_is_no_step_is_refused_by_the_parser(store, step, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["pin", str(store.root), step])
    assert (
        caught.value.code == 2 and "expected a number of steps" in capsys.readouterr().err
    ) or step == "-1"


def test_every_command_speaks_json_and_pins_are_shown(store, tmp_path, capsys):
    assert rows(capsys, "pin", store.root.parent, 1) == (0, [{"step": 1, "pinned": True}])
    assert [one["pinned"] for one in rows(capsys, "ls", store.root.parent)[1]] == [True, False, False]
    assert rows(capsys, "prune", store.root, "--keep", 1) == (0, [{"removed": [2]}])
    assert rows(capsys, "unpin", store.root, 1) == (0, [{"step": 1, "pinned": False}])
    assert rows(capsys, "export", store.root, tmp_path / "out")[1] == [
        {"step": 3, "folder": str(tmp_path / "out")}
    ]
    assert rows(capsys, "show", store.root)[1][0]["tensors"]["model.w"]["shape"] == [4]


def test_diff_says_how_much_differs(store, capsys):
    code, told = rows(capsys, "diff", store.folder(1), store.folder(3))
    assert code == 1
    assert told == [
        {
            "tensor": "model.w",
            "difference": "differs in 4 of 4 elements, by at most 2",
            "elements": 4,
            "of": 4,
            "most": 2.0,
            "relative": pytest.approx(2 / 3),
            "rms": 2.0,
        }
    ]


@pytest.mark.parametrize(("value", "told"), [(float("nan"), "nan"), (float("inf"), "inf"), (-0.0, None)])
def test_diff_of_what_is_not_finite_is_json(tmp_path, capsys, value, told):
    store = Store(tmp_path)
    store.save(1, Snapshot({"w": torch.zeros(2)}))
    store.save(2, Snapshot({"w": torch.tensor([0.0, value])}))
    code, [one] = rows(capsys, "diff", store.folder(1), store.folder(2))
    assert code == 1 and one.get("most") == told


@pytest.mark.parametrize(
    ("a", "b", "differing", "most"),
    [
        (torch.tensor([2**53 + 1, 5]), torch.tensor([2**53, 5]), 1, 1.0),
        (torch.tensor([2**63 - 1]), torch.tensor([-(2**63)]), 1, 2.0**64),
        (
            torch.tensor([2**64 - 1], dtype=torch.uint64),
            torch.tensor([2**64 - 3], dtype=torch.uint64),
            1,
            2.0,
        ),
        (torch.tensor([1, 2], dtype=torch.uint16), torch.tensor([1, 65535], dtype=torch.uint16), 1, 65533.0),
        (torch.tensor([float("inf"), 0.0]), torch.tensor([float("inf"), 1.0]), 1, 1.0),
        (torch.tensor([float("nan"), 0.0]), torch.tensor([float("nan"), 3.0]), 1, 3.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1, 1.0),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), 1, 1.0),
        (torch.ones(4).to(torch.float8_e4m3fn), torch.zeros(4).to(torch.float8_e4m3fn), 4, 1.0),
    ],
)
def test_diff_is_exact_of_every_dtype_and_beside_what_is_not_finite(tmp_path, capsys, a, b, differing, most):
    store = Store(tmp_path)
    store.save(1, Snapshot({"w": a}))
    store.save(2, Snapshot({"w": b}))
    code, [one] = rows(capsys, "diff", store.folder(1), store.folder(2))
    assert code == 1 and (one["elements"], one["most"]) == (differing, most)


def test_reader_that_leaves_early_sees_no_traceback(store):
    code = f"import sys; from forge_ckpt.cli import main; sys.exit(main(['fsck', {str(store.root)!r}]))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr


def test_export_without_a_model_is_refused(tmp_path, capsys):
    Store(tmp_path / "run").save(1, Snapshot({"optimizer.w": torch.ones(2)}))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "step 1 holds no tensors of a model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000])
def test_import_with_a_config_of_something_else_is_refused(tmp_path, capsys, text):
    (tmp_path / "config.json").write_text(text)
    line = ["import", str(tmp_path), str(tmp_path / "out"), "--llama", str(tmp_path / "config.json")]
    assert main(line) == 2
    assert f"{tmp_path / 'config.json'} " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "1e9", "-1", "x"])
def test_what_is_no_size_of_a_file_is_refused_by_the_parser(tmp_path, capsys, text):
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path), str(tmp_path / "out"), f"--shard-bytes={text}"])
    assert "expected a number of bytes above 0" in capsys.readouterr().err


CUT_OFF = """
import os, signal, sys
from forge_ckpt.interop import weights
from forge_ckpt.cli import main
number = signal.Signals[sys.argv.pop()]
weights.sync = lambda folder: os.kill(os.getpid(), number)
main()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_export_that_is_cut_off_leaves_nothing_or_the_next_one_tells(store, tmp_path, caplog, name):
    out = tmp_path / "out" / "first"
    command = [sys.executable, "-c", CUT_OFF, "export", str(store.root), str(out), name]
    assert subprocess.run(command, timeout=100, check=False).returncode in (143, -9)
    left = [*out.parent.iterdir()]
    assert len(left) == (name == "SIGKILL"), left
    assert main(["export", str(store.root), str(out.with_name("second"))]) == 0
    assert len(caplog.messages) == len(left)
    for path, told in zip(left, caplog.messages, strict=True):
        assert told.startswith(f"{path} (0.0 MB)") and "remove it" in told


def break_folder(monkeypatch, folder):
    """Nothing in a folder can be opened or looked at any more, as of a disk that has gone bad."""

    def failing(original):
        def call(path, *args, **kwargs):
            if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(f"{folder}/"):
                raise OSError(errno.EIO, "Input/output error", os.fspath(path))
            return original(path, *args, **kwargs)

        return call

    for name in ("open", "lstat", "stat"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))


def test_step_that_can_never_be_read_is_told_passed_over_and_left_alone(store, monkeypatch, capsys):
    break_folder(monkeypatch, store.folder(3))
    for command, state in (("ls", "there"), ("verify", "intact"), ("fsck", "intact")):
        code, told = rows(capsys, command, store.root)
        states = [one["state"] for one in told if one.get("what", "checkpoint") == "checkpoint"]
        assert (code, states) == (2, [state, state, "unreadable"]), command
    live = {"model.w": torch.zeros(4)}
    again = Store(store.root, keep=2)
    found = again.resume(lambda held: live)
    assert found is not None and found.step == 2 and store.newest().step == 2
    for step in (4, 5, 6, 7):
        again.save(step, Snapshot({"model.w": torch.full((4,), float(step))}))
    assert again.steps() == [3, 6, 7]


@pytest.mark.parametrize("command", ["ls", "verify", "fsck"])
@pytest.mark.parametrize("goes", [[1], [1, 2, 3]])
def test_what_a_run_removes_and_adds_meanwhile_is_no_damage(store, monkeypatch, capsys, command, goes):
    read, done = manifests.read, []

    def read_late(folder, sizes=True):
        if not done:
            done.append(True)
            store.save(4, Snapshot({"model.w": torch.ones(4)}))
            [store.remove(step) for step in goes]
        return read(folder, sizes)

    monkeypatch.setattr(manifests, "read", read_late)
    code, told = rows(capsys, command, store.root)
    steps = [one["step"] for one in told if one.get("what", "checkpoint") == "checkpoint"]
    assert (code, steps) == (0, [2, 3] if goes == [1] else [4])


@pytest.mark.parametrize("command", ["ls", "verify", "fsck"])
def test_folder_that_was_emptied_is_not_well_as_the_run_remembers(tmp_path, capsys, command):
    run = tmp_path / "runs" / "one"
    store = Store(run / "checkpoints", marks=[run.parent / ".progress" / "one"])
    store.save(3, Snapshot({"model.w": torch.ones(4)}))
    for path in (store.folder(3), store.root / "PROGRESS"):
        path.rename(tmp_path / path.name)
    assert main([command, str(run)]) == 1
    told = capsys.readouterr()
    assert "step 3" in told.out + told.err


def test_folders_that_only_look_like_steps_are_no_checkpoints(store):
    for name in ("step-0000000009", "step-٠٠٠٠٠٠٠٠٩"):
        (store.root / name).mkdir()
    assert store.steps() == [1, 2, 3] and store.newest().step == 3


def test_diff_takes_folders_by_any_path(store, monkeypatch, tmp_path):
    monkeypatch.chdir(store.folder(1))
    (tmp_path / "latest").symlink_to(store.folder(1))
    assert main(["diff", ".", "../step-000000002"]) == 1
    assert main(["diff", ".", str(tmp_path / "latest")]) == 0
