import errno
import fcntl
import http.server
import json
import os
import resource
import socket
import threading
import time
from pathlib import Path

import pytest
from forge_trainer.cli import main
from forge_trainer.doctor import accounts, folder, machine, network, slurm
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


def test_what_is_asked_for_is_looked_at_and_nothing_else(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert main(["doctor", str(tmp_path), "--for", "wandb", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == ["wandb"]
    with pytest.raises(SystemExit):
        main(["doctor", str(tmp_path), "--for", "wandb,magic"])
    assert "given magic; expected some of train, slurm, gpu, wandb, hf" in capsys.readouterr().err


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
def test_gpu_that_is_asked_for_and_is_not_there_is_wrong(tmp_path, capsys):
    assert main(["doctor", str(tmp_path), "--for", "gpu", "--json"]) == 1
    assert {one["state"] for one in json.loads(capsys.readouterr().out)} == {"wrong"}
    assert main(["doctor", str(tmp_path), "--for", "train", "--json"]) == 0
    assert {"GPUs"} <= {one["name"] for one in json.loads(capsys.readouterr().out)}


class Server(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(401)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server():
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def test_credentials_are_found_where_the_libraries_look_for_them(tmp_path, server):
    nothing = {
        "WANDB_BASE_URL": server,
        "NETRC": str(tmp_path / "netrc"),
        "HF_HOME": str(tmp_path),
        "HF_ENDPOINT": server,
    }
    found = by_name(accounts.wandb_findings(nothing) + accounts.hub_findings(nothing))
    assert {name: one.state for name, one in found.items()} == {
        "wandb key": "wrong",
        "wandb server": "fine",
        "hub cache": "fine",
        "hub token": "warning",
        "hub": "fine",
    }
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password key\n")
    (tmp_path / "token").write_text("hf_x")
    (tmp_path / "hub" / "models--a--b").mkdir(parents=True)
    found = by_name(accounts.wandb_findings(nothing) + accounts.hub_findings(nothing))
    assert found["wandb key"].state == found["hub token"].state == "fine"
    assert found["hub cache"].found.startswith("1 models")
    assert (
        by_name(accounts.wandb_findings(nothing | {"NETRC": "/no", "WANDB_API_KEY": "k"}))["wandb key"].state
        == "fine"
    )


@pytest.mark.parametrize("url", ["http://[::1", "http://host:port", "ftp://host", "https://", "a b"])
def test_address_that_is_none_is_told(url, tmp_path):
    (tmp_path / "netrc").write_bytes(b"\xff\xfe machine")
    found = by_name(accounts.wandb_findings({"WANDB_BASE_URL": url, "NETRC": str(tmp_path / "netrc")}))
    assert found["wandb server"].state == "wrong" and url in found["wandb server"].found
    assert found["wandb key"].state == "wrong"


def test_server_of_another_protocol_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet():
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail\r\n")

        threading.Thread(target=greet, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        found = by_name(accounts.wandb_findings({"WANDB_BASE_URL": url, "WANDB_API_KEY": "k"}))
    assert found["wandb server"].state == "warning" and "does not answer" in found["wandb server"].found


def test_server_that_does_not_answer_is_a_warning_with_a_remedy(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = by_name(
        accounts.hub_findings({"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{port}"})
    )["hub"]
    assert found.state == "warning" and "does not answer" in found.found and "HF_HUB_OFFLINE" in found.remedy
    offline = by_name(accounts.hub_findings({"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}))
    assert offline["hub"].state == "fine"


def test_interface_that_does_not_exist_is_wrong():
    found = by_name(network.network_findings({"GLOO_SOCKET_IFNAME": "nowhere0"}))
    assert found["GLOO_SOCKET_IFNAME"].state == "wrong" and "lo 127.0.0.1" in found["interfaces"].found
    assert "NCCL_SOCKET_IFNAME" not in by_name(network.network_findings({"NCCL_SOCKET_IFNAME": "^docker,lo"}))
