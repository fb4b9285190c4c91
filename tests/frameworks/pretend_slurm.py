"""A Slurm cluster of several nodes on this machine: a controller and one slurmd for each node, each with devices that are none.

Needs root, and Debian's slurmctld, slurmd, slurm-client and munge. Nothing outside the folder is touched but ports.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NODES, GPUS = 2, 8
READY_SECONDS = 60.0

CONFIGURATION = """\
ClusterName=pretend
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
GresTypes=gpu
NodeName=gpu[1-{nodes}] NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=96 RealMemory=1000 Gres=gpu:h100:{gpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

DEVICES = """\
AutoDetect=off
NodeName=gpu[1-{nodes}] Name=gpu Type=h100 File={folder}/gpu[0-{last}]
"""


@dataclass(frozen=True)
class PretendCluster:
    """The folder of a running cluster."""

    folder: Path

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What Slurm's commands need to find it."""
        return {**environment, "SLURM_CONF": str(self.folder / "slurm.conf")}


@contextmanager
def pretend_cluster(folder: Path) -> Iterator[PretendCluster]:
    """A cluster that is up: every daemon is a child of this process and ends with it."""
    write_configuration(folder)
    cluster = PretendCluster(folder)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands(folder):
            daemons.append(start(command, cluster))
        wait_until_idle(cluster)
        yield cluster
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(timeout=30)


def write_configuration(folder: Path) -> None:
    """Slurm's files, munge's key, and character devices that swallow what is written to them."""
    first = free_ports(NODES + 1)
    names = {"folder": folder, "host": socket.gethostname(), "nodes": NODES, "gpus": GPUS, "controller": first + NODES}
    text = CONFIGURATION.format(**names, first=first, last=first + NODES - 1)
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    (folder / "gres.conf").write_text(DEVICES.format(folder=folder, nodes=NODES, last=GPUS - 1), encoding="utf-8")
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    for number in range(GPUS):
        os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    for name in ("state", *(f"spool-gpu{node + 1}" for node in range(NODES))):
        (folder / name).mkdir()


def commands(folder: Path) -> Iterator[list[str]]:
    """munge, the controller, and one daemon for each node."""
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    yield ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
    yield ["slurmctld", "-D", "-c"]
    yield from (["slurmd", "-D", "-N", f"gpu{node + 1}"] for node in range(NODES))


def start(command: list[str], cluster: PretendCluster) -> subprocess.Popen[bytes]:
    """A daemon in the foreground; what it says stands beside its configuration."""
    with (cluster.folder / f"{'-'.join((command[0], command[-1])).replace('/', '_')[:40]}.log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log, env=cluster.environment(os.environ))
    if command[0] == "munged":
        wait_for(lambda: (cluster.folder / "munge.socket").exists())
    return daemon


def wait_until_idle(cluster: PretendCluster) -> None:
    """Return when every node has registered."""
    command = ["sinfo", "--noheader", "--format=%D %t"]
    env = cluster.environment(os.environ)
    wait_for(lambda: subprocess.run(command, env=env, capture_output=True, text=True).stdout.strip() == f"{NODES} idle")


def wait_for(holds: Callable[[], bool]) -> None:
    """Return when a condition holds. Raises TimeoutError."""
    end = time.monotonic() + READY_SECONDS
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("the pretend cluster did not come up")
        time.sleep(0.2)


def free_ports(count: int) -> int:
    """The first of some ports in a row that nobody uses."""
    for first in range(21000, 30000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise OSError("no ports are free")
