import errno
import fcntl
import json
import os
import resource
import socket
import time

import pytest
from forge_trainer.cli import main
from forge_trainer.doctor import folder, machine, slurm
from forge_trainer.doctor.finding import Finding


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_good_folder_is_fine_and_stays_as_it_was(tmp_path):
    found = by_name(folder.folder_findings(tmp_path / "runs"))
    assert {name: found[name].state for name in ("rename", "flock", "clock")} == dict.fromkeys(
        ("rename", "flock", "clock"), "fine"
    )
    assert list((tmp_path / "runs").iterdir()) == []


def test_folder_that_cannot_be_made_is_wrong_and_so_is_the_exit_code(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["doctor", str(tmp_path / "file"), "--json"]) == 1
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["run folder"]["state"] == "wrong" and "Not a directory" in found["run folder"]["found"]
    assert found["run folder"]["why"] and found["run folder"]["remedy"]
    assert found["torch"]["state"] in ("fine", "warning")
    assert main(["doctor", str(tmp_path / "runs")]) == 0
    assert "0 wrong" in capsys.readouterr().out


def test_disk_that_fails_is_wrong(tmp_path, monkeypatch):
    def fail(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    found = by_name(folder.folder_findings(tmp_path))["durable"]
    assert (found.state, found.found) == ("wrong", "EIO: Input/output error")


def test_renames_that_replace_locks_that_do_not_hold_and_wrong_clocks_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "rename", lambda old, new: None)
    monkeypatch.setattr(fcntl, "flock", lambda file, how: None)
    now = time.time()
    monkeypatch.setattr(folder.time, "time", lambda: now - 60)
    found = by_name(folder.folder_findings(tmp_path))
    assert found["rename"].state == "wrong"
    assert found["flock"].state == "warning"
    assert found["clock"].state == "warning" and found["clock"].found.startswith("the file system is +60")


def test_limits_and_names_of_the_machine(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    found = by_name(machine.machine_findings())
    assert found["open files"].state == "warning" and "ulimit -n 1024" in found["open files"].remedy
    assert found["cores"].state == "warning"
    assert found["host name"].state == "wrong" and "GLOO_SOCKET_IFNAME" in found["host name"].remedy


@pytest.mark.parametrize(
    ("environ", "state", "found"),
    [
        ({"HOME": "/"}, "fine", "none"),
        ({"NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "WARN"}, "fine", "NCCL_DEBUG=WARN, NCCL_P2P_DISABLE=0"),
        ({"NCCL_IB_DISABLE": "1"}, "warning", "NCCL_IB_DISABLE=1"),
    ],
)
def test_settings_of_nccl_are_named(environ, state, found):
    finding = machine.nccl_settings(environ)
    assert finding.state == state and finding.found.startswith(found)


@pytest.mark.parametrize(
    ("settings", "states"),
    [
        ("JobRequeue = 1\nKillWait = 30 sec\n", ["fine", "fine"]),
        ("JobRequeue = 0\nKillWait = 5 sec\n", ["warning", "warning"]),
    ],
)
def test_settings_of_slurm(tmp_path, monkeypatch, settings, states):
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\ncat <<'END'\nSLURM_VERSION = 22.05.8\n{settings}END\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = by_name(slurm.slurm_findings())
    assert [found["requeue"].state, found["KillWait"].state] == states
    assert found["SLURM"].found.startswith("22.05.8")
