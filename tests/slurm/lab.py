"""A Slurm cluster of several nodes on this machine, for tests: real daemons, real jobs.

Each node is a slurmd in namespaces of its own, with its own host name, process ids and /dev/shm. Ending a node's first
process is a power cut. Needs root and Debian's slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_ports
from tests.waiting import wait_for

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "setpriv")
_DISK_BYTES = 1 << 20
#: linux/fs.h
_MNT_DETACH = 2

_CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={port}
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdPidFile={root}/slurmd.%n.pid
SlurmdLogFile={root}/log/slurmd.%n.log
SlurmdSpoolDir={root}/spool/%n
StateSaveLocation={root}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=5
SlurmctldTimeout=30
KillWait=5
UnkillableStepTimeout=180
Waittime=0
PropagateResourceLimits=NONE
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
"""
_PARTITIONS = """\
PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=60 State=UP OverSubscribe=NO PriorityTier=10
PartitionName=short Nodes=n[1-{nodes}] MaxTime=1 State=UP OverSubscribe=NO PriorityTier=10
PartitionName=urgent Nodes=n[1-{nodes}] MaxTime=60 State=UP PriorityTier=20 PreemptMode=OFF
PartitionName=scavenge Nodes=n[1-{nodes}] MaxTime=60 State=UP PriorityTier=1 PreemptMode=CANCEL GraceTime=60
PartitionName=apart Nodes={apart} MaxTime=1 State=UP
"""


@contextlib.contextmanager
def running(nodes: int) -> Iterator[Lab]:
    """Start a cluster for a block; Slurm's commands of this process find it there."""
    # Not below pytest's folder: that is private, and munge's daemon runs as another user. Paths of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="hlatctl-slurm-"))
    lab, before = Lab(folder, nodes), dict(os.environ)
    os.environ.update(lab.env)
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


def why_not() -> str:
    """Why no lab can be started here; empty if one can."""
    if os.geteuid():
        return "needs root: each node of the lab is in namespaces of its own"
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    packages = "apt-get install slurmctld slurmd slurm-client munge"
    return f"{', '.join(missing)} not installed ({packages})" if missing else ""


class Lab:
    """The cluster, its daemons and what a test does to them; the nodes are called n1, n2 and so on."""

    def __init__(self, root: Path, nodes: int) -> None:
        self.root, self.nodes = root, [f"n{number + 1}" for number in range(nodes)]
        self.apart = f"n{nodes + 1}"
        """A node of a partition of its own, for a job that runs beside other tests."""
        self._munged: subprocess.Popen[bytes] | None = None
        self._controller: subprocess.Popen[bytes] | None = None
        self._outer: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def env(self) -> dict[str, str]:
        """Variables with which Slurm's commands find this cluster."""
        return {"SLURM_CONF": str(self.root / "slurm.conf"), "MUNGE_SOCKET": str(self.root / "munge" / "socket")}

    @property
    def hasty(self) -> Path:
        """Slurm's settings for commands that give up after 1 s if slurmctld is away, instead of after 9 s."""
        path = self.root / "hasty.conf"
        path.write_text((self.root / "slurm.conf").read_text() + "MessageTimeout=2\n")
        return path

    @property
    def disk(self) -> Path:
        """A small disk that all nodes share, which a test may fill."""
        return self.root / "disk"

    def start(self) -> None:
        """Start the daemons; return when all nodes are idle."""
        for folder in ("log", "state", "spool", "munge", "disk"):
            (self.root / folder).mkdir(parents=True)
        # Before the nodes, which see no later mount.
        subprocess.run(("mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", self.disk), check=True)
        self._start_munge()
        self._write_conf()
        self.start_controller()
        for node in (*self.nodes, self.apart):
            (self.root / "spool" / node).mkdir()
            self.boot(node)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Wait until all nodes can start a job, without the one apart."""
        wait_for(lambda: all(self.state_of(node) == "idle" for node in self.nodes))

    def stop(self) -> None:
        for node in list(self._outer):
            self.cut(node)
        for daemon in (self._controller, self._munged):
            if daemon:
                daemon.kill()
                daemon.wait()
        ctypes.CDLL(None).umount2(os.fsencode(self.disk), _MNT_DETACH)  # a program can't start at a session's end

    def start_controller(self) -> None:
        self._controller = self._start("slurmctld", "-D", "-f", str(self.root / "slurm.conf"))
        wait_for(lambda: self.command("scontrol", "ping").returncode == 0)

    def stop_controller(self) -> None:
        """End slurmctld, which saves what it knows; jobs continue."""
        assert self._controller
        self._controller.terminate()
        self._controller.wait()

    def boot(self, node: str) -> None:
        root = self.root
        script = (
            f"hostname {node} && mount --bind {root}/hosts /etc/hosts && mount -t tmpfs tmpfs /dev/shm && "
            f"exec slurmd -D -N {node} -f {root}/slurm.conf"
        )
        self._outer[node] = self._start(
            "unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", script
        )

    def cut(self, node: str) -> None:
        """Cut a node's power: all of its processes die immediately."""
        children, outer = self._inner(node), self._outer.pop(node)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        outer.kill()
        outer.wait()

    def memory(self, node: str) -> Path:
        """A node's /dev/shm, which its power cut empties."""
        (slurmd,) = self._inner(node)
        return Path(f"/proc/{slurmd}/root/dev/shm")

    def dark(self) -> list[str]:
        """The nodes whose power is cut."""
        return [node for node in self.nodes if node not in self._outer]

    def kill_step(self, node: str) -> None:
        """Kill Slurm's program that runs a step on a node, as the kernel does if memory ran out."""
        (slurmd,) = self._inner(node)
        space = os.readlink(f"/proc/{slurmd}/ns/pid")
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                title = (entry / "cmdline").read_text()
                if title.startswith("slurmstepd: [") and ".0]" in title and os.readlink(entry / "ns/pid") == space:
                    os.kill(int(entry.name), signal.SIGKILL)

    @contextlib.contextmanager
    def hidden(self, folder: Path, node: str) -> Iterator[None]:
        """Hide a folder's content from a node, as if storage was not mounted there."""
        (slurmd,) = self._inner(node)
        there = ("nsenter", "--mount", "--pid", f"--target={slurmd}")
        subprocess.run((*there, "mount", "-t", "tmpfs", "tmpfs", folder), check=True)
        try:
            yield
        finally:
            subprocess.run((*there, "umount", "--lazy", folder), check=True)

    @contextlib.contextmanager
    def drained(self, *nodes: str) -> Iterator[None]:
        """Take nodes out of service for new jobs, as an administrator does."""
        for node in nodes:
            self.command("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
        try:
            yield
        finally:
            for node in nodes:
                self.command("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def state_of(self, node: str) -> str:
        """A node's state in Slurm's words, such as ``idle``."""
        return self.command("sinfo", "-h", "-N", "-p", "main", "-n", node, "-o", "%T").stdout.strip()

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, env={**os.environ, **self.env}, capture_output=True, text=True, check=False)

    def _inner(self, node: str) -> list[str]:
        """The first process of a node, by its id outside; none if it has ended."""
        pid = self._outer[node].pid
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.root / "log" / f"{words[0]}.out").open("ab") as output:
            return subprocess.Popen(
                # Also after a test run that was killed, no daemon is left.
                ("setpriv", "--pdeathsig=KILL", "--", *words),
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _start_munge(self) -> None:
        folder = self.root / "munge"
        key = folder / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for path in (folder, key):
            shutil.chown(path, "munge", "munge")
        for parent in folder.parents:  # pytest's folders are for one user alone; munged runs as another
            if not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o011)
        folder.chmod(0o755)
        self._munged = self._start(
            "setpriv",
            "--pdeathsig=KILL",  # changing the user clears it
            "--reuid=munge",
            "--regid=munge",
            "--clear-groups",
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={folder}/socket",
            f"--pid-file={folder}/pid",
            f"--log-file={folder}/log",
            f"--seed-file={folder}/seed",
            "--num-threads=2",
        )
        wait_for(lambda: (folder / "socket").exists())

    def _write_conf(self) -> None:
        nodes = (*self.nodes, self.apart)
        ports = free_ports(len(nodes) + 1)
        memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 9 // 10 // len(nodes) >> 20
        lines = [_CONF.format(host=socket.gethostname().split(".")[0], root=self.root, port=ports[0])]
        for node, port in zip(nodes, ports[1:], strict=True):
            lines.append(
                f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port} CPUs=1 "
                f"RealMemory={memory_mb} State=UNKNOWN\n"
            )
        lines.append(_PARTITIONS.format(nodes=len(self.nodes), apart=self.apart))
        (self.root / "slurm.conf").write_text("".join(lines))
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        names = [f"127.0.0.1 localhost {socket.gethostname()}", *(f"127.0.0.1 {node}" for node in nodes)]
        (self.root / "hosts").write_text("\n".join(names) + "\n")


@dataclass(frozen=True, kw_only=True)
class Held:
    """A job that waits because of sbatch's ``--hold``; the name ends with its run, its attempt and what it does."""

    number: str
    partition: str
    nodes: str
    name: str

    def of(self, run_id: str) -> bool:
        return f"/{run_id}/" in self.name


def held(lab: Lab) -> list[Held]:
    lines = lab.command("squeue", "-h", "-t", "PENDING", "-o", "%r|%i|%P|%D|%j").stdout.splitlines()
    words = [line.split("|", 4) for line in lines if line.startswith("JobHeldUser|")]
    return [Held(number=number, partition=where, nodes=nodes, name=name) for _, number, where, nodes, name in words]


def release(lab: Lab, *, but: str = "") -> bool:
    """Release every held job, but not those of one run. Never true, so that a wait can release and look."""
    for job in held(lab):
        if not (but and job.of(but)):
            lab.command("scontrol", "release", job.number)
    return False
