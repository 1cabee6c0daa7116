"""``python -m hlatctl.allocation FOLDER IDLE_S``: holds the nodes of a Slurm job and runs a run's jobs on them in turn.

This is the batch program of an allocation and runs on its first node. A driver orders a round by a file in FOLDER,
which names the job's script and how many nodes it needs:

    round-0001.order      waits; the driver withdraws it by renaming it to round-0001.withdrawn
    round-0001.taken      is running or has run
    round-0001.nodes      the hosts that it got
    cut                   the hosts that were found cut off, which no round gets any more
    released              no more rounds are taken, because the driver asked for that
    closed                no more rounds are taken, because this program is ending

Either the driver or this program renames an order, never both. Standard library only.

The program chooses a round's nodes from those that the scheduler reports as up, except those that the order excludes.
While a round runs, it finds nodes that are cut off (``hlatctl.cut_nodes``) and ends the round before Slurm would.
It ends if the driver releases the nodes, if no order comes for IDLE_S seconds, if too few nodes are left, or if the
scheduler asked a round to stop because it will soon take the nodes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hlatctl import node, warm
from hlatctl.cut_nodes import Watch
from hlatctl.run import files, memory, processes
from hlatctl.run.files import DAMAGED
from hlatctl.run.paths import RunPaths

TOKEN_ENV = "HLATCTL_TOKEN"
#: The nodes of a round, as Slurm writes lists; a script that is submitted by hand runs on all nodes of its job.
NODE_LIST_ENV = "HLATCTL_NODE_LIST"
#: Interval between two looks for an order: soon after a round, when the next one restarts training, and later.
_SOON_S, _POLL_S, _SOON_FOR_S = 0.1, 0.5, 60.0
#: Interval between two queries to a scheduler that does not answer.
_ASK_AGAIN_S = 5.0
#: Time for a step of processes that do nothing to end, and for a round to end after one of its nodes was cut off.
_END_S = 10.0
#: How long to wait for connections of nodes before the next look at a round's end.
_LOOK_S = 0.1
_SLURMD_PORT = re.compile(r"^SlurmdPort\s*=\s*(\d+)", re.MULTILINE)
#: Prefixes of node states (sinfo(1), "NODE STATE CODES") in which a node can't start a round.
UNUSABLE = ("down", "drain", "fail", "unk", "inval")


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a round runs.

    Args:
        script: the job's script, ``JOB.sh``.
        token: the job's token; the script does nothing if the driver has abandoned that job.
        nodes: number of nodes.
        all_nodes: take every usable node, at least ``nodes``.
        excluded: hosts that must not be used.
        avoided: hosts to use only if there are too few others.
        imports: identifies what its processes import, which stays on the nodes for the next round (``hlatctl.warm``);
            empty: it must start anew, and leaves nothing.
        progress: a file that changes with each step of training.
    """

    script: str
    token: str
    nodes: int
    all_nodes: bool = False
    excluded: tuple[str, ...] = ()
    avoided: tuple[str, ...] = ()
    imports: str = ""
    progress: str = ""

    def choose(self, hosts: Sequence[str], unusable: Collection[str] = ()) -> list[str]:
        """Return the hosts of the round, in the given order; empty if there are too few."""
        fit = [host for host in hosts if host not in unusable and host not in self.excluded]
        if len(fit) < self.nodes:
            return []
        chosen = fit if self.all_nodes else sorted(fit, key=lambda host: host in self.avoided)[: self.nodes]
        return [host for host in fit if host in chosen]


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round of an allocation, known by its number."""

    folder: Path
    number: int

    def file(self, kind: str) -> Path:
        """Return one of its files: ``order``, ``taken``, ``withdrawn``, ``nodes``."""
        return self.folder / f"round-{self.number:04d}.{kind}"

    def write(self, order: Order) -> None:
        """Write the order file."""
        files.write_json(self.file("order"), {"v": 1, **asdict(order)})

    def move(self, kind: str) -> bool:
        """Take or withdraw its order; return whether it still waited."""
        try:
            self.file("order").rename(self.file(kind))
        except FileNotFoundError:
            return False
        return True

    @property
    def waits(self) -> bool:
        """Whether the order still waits."""
        return self.file("order").exists()

    @property
    def taken(self) -> bool:
        """Whether it runs or has run."""
        return self.file("taken").exists()

    def hosts(self) -> tuple[str, ...]:
        """Return the hosts that it got; empty: not known yet."""
        try:
            return tuple(str(host) for host in files.read_json(self.file("nodes"))["hosts"])
        except (OSError, *DAMAGED):
            return ()

    def order(self) -> Order:
        """Return the round's order."""
        value: dict[str, Any] = files.read_json(self.file("order"))
        return Order(
            script=str(value["script"]),
            token=str(value["token"]),
            nodes=int(value["nodes"]),
            all_nodes=bool(value["all_nodes"]),
            excluded=tuple(value["excluded"]),
            avoided=tuple(value["avoided"]),
            imports=str(value["imports"]),
            progress=str(value["progress"]),
        )


def rounds(folder: Path) -> list[Round]:
    """Return all rounds of an allocation that were ever ordered, by number."""
    names = {path.stem.removeprefix("round-") for path in folder.glob("round-[0-9]*.*") if path.suffix != ".tmp"}
    numbers = sorted(int(name) for name in names if name.isdecimal())
    return [Round(folder=folder, number=number) for number in numbers]


def ended_file(base: Path) -> Path:
    """Return the file in which a job's script writes, last, its exit code."""
    return base.with_name(f"{base.name}.ended")


@dataclass(frozen=True, kw_only=True)
class CutNodes:
    """The hosts that were found cut off, and why."""

    hosts: tuple[str, ...] = ()
    why: str = ""


def cut_file(base: Path) -> Path:
    """Return the file with the hosts that were found cut off during a job, if there are any."""
    return base.with_name(f"{base.name}.cut")


def read_cut(path: Path) -> CutNodes:
    """Return the content of :func:`cut_file`, or of an allocation's file ``cut``."""
    try:
        value = files.read_json(path)
        return CutNodes(hosts=tuple(str(host) for host in value["hosts"]), why=str(value["why"]))
    except (OSError, *DAMAGED):
        return CutNodes()


def asked_from_outside(base: Path, nodes: int = 1) -> bool:
    """Return whether all nodes of a job were asked to stop by something other than the driver.

    If one node fails, srun asks the others to stop. A node without a record of its end has failed.

    Args:
        base: path prefix of the job's records.
        nodes: minimum number of the job's nodes.
    """
    try:
        ours = files.read_json(node.orders(base))["what"] in ("stop", "end")
    except (OSError, *DAMAGED):
        ours = False
    ends = _ends(base)
    return not ours and len(ends) >= nodes and all(end.get("asked_to_stop") for end in ends)


def _ends(base: Path) -> list[dict[str, Any]]:
    """Return the records of the ends of a job's nodes; an empty one for each that can't be read."""
    paths = [path for path in base.parent.glob(f"{base.name}.*exit_code") if path.suffix == ".exit_code"]
    return list(map(_end, paths))


class _Warm:
    """The processes that wait on the nodes with what a job imports (``hlatctl.warm``): a step of Slurm's, or a few."""

    def __init__(self) -> None:
        self._imports = self._name = ""
        self._hosts, self._steps = set[str](), list[subprocess.Popen[bytes]]()

    def prepare(self, order: Order, hosts: Sequence[str]) -> dict[str, str]:
        """Start them on those of the hosts on which none waits; return the variables with which a round finds them.

        If the round imports something else, the others end.
        """
        if order.imports != self._imports:
            self.end()
            self._imports, self._name = order.imports, uuid.uuid4().hex
        if not self._imports:
            return {}
        env = {warm.WARM_ENV: self._name}
        if new := [host for host in hosts if host not in self._hosts]:
            print(f"importing on {', '.join(new)}", flush=True)
            starts = {warm.STARTS_ENV: "1", TOKEN_ENV: order.token, NODE_LIST_ENV: ",".join(new)}
            self._steps = [step for step in self._steps if step.poll() is None]
            self._steps.append(subprocess.Popen(("bash", order.script), env={**os.environ, **env, **starts}))
            self._hosts.update(new)
            env[warm.NEW_ENV] = "1"
        return env

    def saw(self, base: Path) -> None:
        """Note on which nodes of an ended round none was found."""
        for end in _ends(base):
            if not end.get("warm"):
                self._hosts.discard(str(end.get("host")))

    def end(self) -> None:
        """End them."""
        for step in self._steps:
            step.terminate()
        for step in self._steps:
            try:
                step.wait(_END_S)
            except subprocess.TimeoutExpired:
                step.kill()
                step.wait()
        self._steps, self._hosts = [], set()


class Allocation:
    """The batch program.

    Args:
        folder: folder with the orders.
        idle_s: time without an order after which it ends.
    """

    def __init__(self, folder: Path, idle_s: float) -> None:
        self._folder, self._idle_s = folder, idle_s
        self._job, self._ends = os.environ["SLURM_JOB_ID"], False
        self._warm = _Warm()
        self._here = os.environ.get("SLURMD_NODENAME") or processes.node_name()

    def run(self) -> int:
        """Run rounds until there is a reason to end."""
        signal.signal(signal.SIGTERM, self._end)
        free_since = time.monotonic()
        while not self._ends:
            waiting, released = self._waiting(), self._has("released")
            if waiting and not released:
                self._ends |= not self._serve(*waiting)
                free_since = time.monotonic()
            elif released or self._has("closed") or time.monotonic() - free_since > self._idle_s:
                self._ends |= self._close() or released
            else:
                time.sleep(_SOON_S if time.monotonic() - free_since < _SOON_FOR_S else _POLL_S)
        self._close()
        self._warm.end()
        self._forget()
        return 0

    def _waiting(self) -> tuple[Round, Order] | None:
        for round_ in rounds(self._folder):
            if not round_.waits:
                continue
            try:
                return round_, round_.order()
            except OSError:
                continue  # withdrawn meanwhile
            except DAMAGED:
                print(f"{round_.file('order')}: is damaged and withdrawn", flush=True)
                round_.move("withdrawn")
        return None

    def _serve(self, round_: Round, order: Order) -> bool:
        """Run a round; return whether the nodes can take another one."""
        usable = self._usable()
        if usable is None or not round_.move("taken"):
            return True
        hosts = order.choose(usable)
        where = ", ".join(hosts) or "no nodes, because too few are left"
        print(f"round {round_.number}: {order.script} on {where}", flush=True)
        files.write_json(round_.file("nodes"), {"v": 1, "hosts": hosts})
        if not hosts:
            return False
        # Spare nodes too: one may replace a node of a later round.
        others = [host for host in usable if host not in order.excluded]
        env = self._warm.prepare(order, others)
        spare = [host for host in others if host not in hosts]
        code = self._run(order, hosts, spare, env)
        base = Path(order.script).with_suffix("")
        if not ended_file(base).exists():  # its shell was killed, or the driver abandoned the job
            files.write_json(ended_file(base), {"v": 1, "code": code})
        if order.imports:
            self._warm.saw(base)
        return not asked_from_outside(base, len(hosts))

    def _run(self, order: Order, hosts: Sequence[str], spare: Sequence[str], env: dict[str, str]) -> int:
        with Watch(
            hosts, spare=spare, needed=order.nodes, here=self._here, progress=Path(order.progress), addresses=_addresses
        ) as watch:
            env = {**os.environ, **env, **watch.env, TOKEN_ENV: order.token, NODE_LIST_ENV: ",".join(hosts)}
            script = subprocess.Popen(("bash", order.script), env=env)
            while script.poll() is None:
                if cut := watch.look(_LOOK_S):
                    self._note_cut(cut, Path(order.script).with_suffix(""))
                    _end_round(watch, script)
        return 128 - script.returncode if script.returncode < 0 else script.returncode

    def _note_cut(self, cut: Sequence[str], base: Path) -> None:
        """Record which nodes are cut off, for the driver and for the next rounds."""
        why = f"no answer from {', '.join(cut)}, nor from slurmd there, while other nodes answered; no step was made"
        print(f"{why}; ending the round", flush=True)
        known = read_cut(self._folder / "cut").hosts
        files.write_json(self._folder / "cut", {"v": 1, "hosts": [*known, *cut], "why": why})
        files.write_json(cut_file(base), {"v": 1, "hosts": list(cut), "why": why})

    def _usable(self) -> list[str] | None:
        """Return the job's hosts that can start a round; None if the scheduler does not answer."""
        nodes = _ask("squeue", "--noheader", f"--jobs={self._job}", "--format=%N")
        hosts = _ask("scontrol", "show", "hostnames", nodes.strip()) if nodes else None
        states = _ask("sinfo", "-h", "-N", "-n", ",".join(hosts.split()), "-o", "%N|%T") if hosts else None
        if hosts is None or states is None:
            time.sleep(_ASK_AGAIN_S)
            return None
        unusable = {line.split("|")[0] for line in states.splitlines() if line.split("|")[1].startswith(UNUSABLE)}
        unusable.update(read_cut(self._folder / "cut").hosts)
        return [host for host in hosts.split() if host not in unusable]

    def _forget(self) -> None:
        """Remove the run's copies from the memory of the nodes (``hlatctl.run.memory``)."""
        copies = memory.of_run(RunPaths(self._folder.parent.parent))
        if copies.exists() and (hosts := self._usable()):
            placed = (f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", f"--nodelist={','.join(hosts)}")
            words = ("srun", "--overlap", "--no-kill", *placed, "rm", "-rf", "--", os.fspath(copies))
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(words, timeout=_END_S, check=False, stdin=subprocess.DEVNULL)

    def _has(self, name: str) -> bool:
        return (self._folder / name).exists()

    def _close(self) -> bool:
        (self._folder / "closed").touch()
        return not any(round_.waits for round_ in rounds(self._folder))

    def _end(self, *_: object) -> None:
        """Handle the scheduler's SIGTERM: ask the running round to stop too; it is the last one."""
        self._ends = True


def _end_round(watch: Watch, script: subprocess.Popen[bytes]) -> None:
    """End a round that has lost a node: first what runs on the others, then srun, which would wait for the lost one."""
    watch.order_end()
    deadline_s = time.monotonic() + _END_S
    while watch.connected and time.monotonic() < deadline_s and script.poll() is None:
        watch.look(_LOOK_S)
    below = [process for pid in processes.descendants(script.pid) if (process := processes.identify(pid))]
    script.kill()  # first, or else it would take srun's end for the job's
    for process in below:
        processes.send(process, signal.SIGKILL)
    script.wait()


def _addresses(hosts: Collection[str]) -> dict[str, tuple[str, int]]:
    """Return where slurmd listens on some hosts; empty if the scheduler does not answer."""
    shown, found = _ask("scontrol", "--oneliner", "show", "node", ",".join(hosts)), dict[str, tuple[str, int]]()
    for line in (shown or "").splitlines():
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        port = words.get("Port") or _usual_port()
        if port and "NodeAddr" in words:
            found[words["NodeName"]] = words["NodeAddr"], int(port)
    return found


def _usual_port() -> str:
    match = _SLURMD_PORT.search(_ask("scontrol", "show", "config") or "")
    return match[1] if match else ""


def _ask(*words: str) -> str | None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    return None if done.returncode else done.stdout


def _end(record: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, *DAMAGED):
        return dict(files.read_json(record))
    return {}


def main(argv: list[str]) -> int:
    """Run the program."""
    if len(argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    return Allocation(Path(argv[0]).absolute(), float(argv[1])).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
