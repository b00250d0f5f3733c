"""A SLURM of two nodes on this machine that touches nothing of the system; needs slurm-wlm and munge.

Facts behind the settings: without `cred_expire` a job that is requeued waits two minutes; `linuxproc` needs
no cgroups; a node may not claim more processors than the machine has.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("n1", "n2")

SETTINGS = """
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=30
SlurmdTimeout=30
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=grace Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=100 PreemptMode=OFF
"""


def missing() -> str | None:
    """Why there can be no SLURM here."""
    tools = [name for name in TOOLS if shutil.which(name) is None]
    if tools:
        return f"no {', '.join(tools)}: apt-get install slurm-wlm munge"
    return "SLURM's daemons need root here" if os.geteuid() else None


class PrivateSlurm:
    """Starts the daemons; `with` ends them.

    Attributes:
        environment: for commands that talk to this SLURM.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "PrivateSlurm":
        folder = self._folder
        for name in ("munge", "state", "spool/n1", "spool/n2"):
            (folder / name).mkdir(parents=True)
        for path in (folder, folder / "munge"):
            path.chmod(0o755)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        host, port = socket.gethostname().partition(".")[0], 20000 + os.getpid() % 9000
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port + nth} CPUs=1 State=UNKNOWN"
            for nth, name in enumerate(NODES, 1)
        ]
        settings = SETTINGS.format(folder=folder, host=host, port=port)
        partitions = settings.index("PartitionName")
        conf = folder / "slurm.conf"
        conf.write_text(settings[:partitions] + "\n".join(nodes) + "\n" + settings[partitions:])
        munge = folder / "munge"
        self._start(
            "munged", "--force", "-S", munge / "sock", f"--key-file={key}", f"--pid-file={munge / 'pid'}",
            f"--log-file={munge / 'log'}", f"--seed-file={munge / 'seed'}",
        )  # fmt: skip
        self._start("slurmctld", "-c", "-f", conf)
        for name in NODES:
            self._start("slurmd", "-c", "-N", name, "-f", conf)
        self.wait(lambda: self("sinfo", "-h", "-t", "idle", "-p", "low", "-o", "%D").strip() == "2", 30)
        return self

    def _start(self, *words: object) -> None:
        subprocess.run([*map(str, words)], env=self.environment, check=True)

    def __exit__(self, *_: object) -> None:
        self("scancel", "--user=root", check=False)
        pids = [
            *self._folder.glob("slurmd.*.pid"),
            self._folder / "slurmctld.pid",
            self._folder / "munge/pid",
        ]
        for path in pids:
            if path.exists():
                os.kill(int(path.read_text()), signal.SIGTERM)
        self.wait(lambda: not any(path.exists() for path in pids), 20)

    def __call__(self, *words: object, check: bool = True) -> str:
        """Run a command of SLURM, or one that talks to it, and return what it printed."""
        done = subprocess.run(
            [*map(str, words)], env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def lose(self, node: str) -> None:
        """The daemon of a node is gone; what it started lives on."""
        path = self._folder / f"slurmd.{node}.pid"
        os.kill(int(path.read_text()), signal.SIGKILL)
        path.unlink()

    def bring_back(self, node: str) -> None:
        """A lost node answers again."""
        self._start("slurmd", "-c", "-N", node, "-f", self._folder / "slurm.conf")

    def wait_until_empty(self, seconds: float) -> None:
        """Until there is no job in any queue."""
        self.wait(lambda: not self("squeue", "-h").strip(), seconds)

    @staticmethod
    def wait(done: Callable[[], bool], seconds: float) -> None:
        """Until something holds."""
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "it took too long"
            time.sleep(0.1)
