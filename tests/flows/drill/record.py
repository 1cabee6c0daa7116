"""``python -m tests.flows.drill.record FAULT…``: inject faults into a real run, and keep what they leave.

Writes the evidence into the faults' files in ``flows/drill/planted``. The run has two nodes of a Slurm cluster on this
machine (``tests.slurm.lab``), which has a spare one. Needs root, and takes about a minute for each fault.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from conf.compose import compose
from flows import pretrain
from flows.drill import faults
from flows.drill.arena import Arena, NotRecovered, NotTried, Servers
from flows.drill.pool import FAULTS, path_of
from flows.launch import endings
from flows.launch.base import Handle, Status, launcher_for
from hlatctl.run import files, rank_output
from hlatctl.run.errors import HlatctlError
from hlatctl.run.journal import DRILL_WRITER, Event, JournalWriter
from hlatctl.run.paths import stacks_name
from tests.e2e.conftest import Cli
from tests.slurm.lab import Lab

_PYTHON = Path(sys.prefix)
_SOURCE = Path(__file__).parents[3]
#: Events that decide about an attempt's end, and their fields that don't matter.
_KINDS = ("hang", "corruption_suspected", "nonfinite", "data_changed", "train_stopped")
_COMMON = ("v", "crc", "seq", "time_unix_s", "writer", "attempt", "pid", "host", "run_id")
#: Lines of a log that name no cause: tracebacks, stacks, steps, and the frame of torchrun's summary.
_OF_NO_INTEREST = re.compile(
    r'^(\[rank\d+\]: )?( *File "|Traceback \(most|    [a-z_]|  [ ]+\^|\^+|.*\^\^\^)|step \d+/|Thread 0x|Current thread|'
    r"processes were asked|^\[rank\d\]:$|^-{5}|^={5}|^E\d{4} .*failed \(exitcode|^trainer FAILED|NO_OTHER|error_file|"
    r"traceback :|^\[rank\d+\]:  |^\[\d\]:$"
)
_LINES, _FRAMES, _LINE_CHARACTERS = 14, 9, 400


class _Text(str):
    """Text that YAML writes line by line."""


yaml.SafeDumper.add_representer(
    _Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")
)


def main() -> int:
    """Record the faults of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    names = parser.parse_args().names
    folder = Path(tempfile.mkdtemp(prefix="hlatctl-record-"))
    lab = Lab(folder / "lab", 3)
    os.environ.update(lab.env)
    try:
        lab.start()
        _record(folder, names, lab)
    finally:
        lab.stop()
    return 0


def _record(folder: Path, names: list[str], lab: Lab) -> None:
    (folder / "run").mkdir()
    overrides = [*Cli(folder / "run").overrides, "train.tokens=1T", "train.max_steps=null"]
    overrides += ["cluster=slurm", "cluster.nodes=2", "cluster.processes_per_node=1", "cluster.slurm.partition=main"]
    overrides += ["budget.node_hours=50", "recovery.hang_floor_s=15", "recovery.max_restarts_without_progress=50"]
    overrides += ["recovery.corruption_check_steps=20", f"runs_dir={folder}"]
    overrides += [f"+backend.env.{name}='{value}'" for name, value in faults.prepare(folder).items()]
    run = pretrain.create(compose(overrides), argv=sys.argv, run_id="drilled")
    with JournalWriter(run, DRILL_WRITER) as journal:
        arena = Arena(run, journal)
        try:
            arena.start()
            for name in names:
                arena.trying = name
                arena.under_way()
                number, mark = arena.attempt.number, len(arena.events)
                try:
                    print(name, _inject(name, arena, lab), flush=True)
                except (NotRecovered, NotTried, HlatctlError) as error:
                    print(name, "FAILED", error, flush=True)
                    arena.look()
                _keep(name, _evidence(arena, number, arena.events[mark:]))
                arena.revive()
        finally:
            arena.stop()


def _inject(name: str, arena: Arena, lab: Lab) -> object:
    """Inject a fault, as an administrator if a drill can't."""
    if FAULTS[name].code:
        return FAULTS.part(name)(arena, Servers(arena.run.root.parent, print), **FAULTS[name].options)
    if name == "lost_node":
        return faults.ended(arena, lambda: lab.cut(arena.attempt.hosts[-1]))
    if name == "scheduler_death":
        try:
            return faults.continued(arena, lab.stop_controller)
        finally:
            lab.start_controller()
    raise NotTried(f"{name}: needs {FAULTS[name].needs}")


def _evidence(arena: Arena, number: int, events: list[Event]) -> dict[str, Any]:
    """Return what the last attempt with the fault has left; ``number`` is the first one."""
    ends = [event for event in events if event["kind"] == "attempt_ended"]
    if not ends:
        return {"recorded": "Slurm", "live": "running"}
    end, number = ends[-1], max([number, *(event["attempt"] for event in ends)])
    attempt = arena.state.attempts[number - 1]
    handle = Handle.from_json(attempt.handle)
    base, hosts = endings.base_of(handle), list(end["hosts"])
    status = launcher_for(arena.config).status(handle)
    found: dict[str, Any] = {"recorded": "Slurm"}
    # The scheduler's later verdict is on the job's remains.
    if end["cause"] == status.verdict:
        found |= {"verdict": status.verdict, "reason": status.reason}
        found |= {"down": [f"n{hosts.index(host) + 1}" for host in _down(status)]} if _down(status) else {}
    if status.exit_code is not None:
        found["exit_code"] = status.exit_code
    if attempt.last_step == 0:
        found["last_step"] = 0
    if (error := base.with_name(f"{base.name}.error.json")).is_file():
        found["error"] = {key: _clean(str(value), arena, hosts) for key, value in files.read_json(error).items()}
    kept = [
        {key: value for key, value in event.items() if key not in _COMMON}
        for event in events
        if event["kind"] in _KINDS and event.get("attempt", number) == number
    ]
    if attempt.last_step == 0 and attempt.resumed_from_step is not None:
        kept.insert(0, {"kind": "train_started", "resumed_from_step": 10})  # the newest checkpoint of a replay
    found |= {"events": kept} if kept else {}
    found["nodes"] = [_of_node(arena, number, rank, hosts) for rank in range(len(hosts))]
    return found


def _down(status: Status) -> tuple[str, ...]:
    return status.blamed_hosts if status.verdict == "node_failed" else ()


def _of_node(arena: Arena, number: int, rank: int, hosts: list[str]) -> dict[str, Any]:
    attempt = arena.state.attempts[number - 1]
    records = endings.node_records(endings.base_of(Handle.from_json(attempt.handle)), len(hosts))
    own = next((record for record in records if record.host == hosts[rank]), None)
    if own is None:
        return {"starts": False}
    first_s = min((record.ended_unix_s for record in records if record.code is not None), default=0.0)
    found: dict[str, Any] = {}
    if own.code is not None:
        found |= {"code": own.code, "ended_s": round(own.ended_unix_s - first_s, 2)}
    found |= {"asked_to_stop": True} if own.asked_to_stop else {}
    found |= {"oom_kills": own.oom_kills} if own.oom_kills else {}
    log = rank_output.node_log(arena.run.logs(number) / "train.log", rank)
    text = _clean(log.read_text(errors="replace"), arena, hosts) if log.is_file() else ""
    if lines := [line[:_LINE_CHARACTERS] for line in text.splitlines() if not _OF_NO_INTEREST.search(line)]:
        found["log"] = _Text("\n".join(lines[-_LINES:]) + "\n")
    stacks = arena.run.hang(number) / stacks_name(rank)
    if stacks.is_file():
        *_, main = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x)", _clean(stacks.read_text(), arena, hosts))
        found["stacks"] = _Text("".join(f"{line}\n" for line in main.splitlines()[:_FRAMES]))
    return found


def _clean(text: str, arena: Arena, hosts: list[str]) -> str:
    """Return a text without this machine's folders, and with the hosts n1 and n2 in the order of nodes."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    for rank, host in enumerate(hosts):
        text = re.sub(rf"\b{re.escape(host)}\b", f"<n{rank + 1}>", text)
    text = re.sub(r"<(n\d)>", r"\1", text)
    places = ((arena.run.root.parent, "/runs"), (_PYTHON, "/venv"), (_SOURCE, "/src"), (Path(sys.base_prefix), "/usr"))
    for folder, name in places:
        text = text.replace(os.fspath(folder), name)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def _keep(name: str, evidence: dict[str, Any]) -> None:
    path = path_of(name)
    before = path.read_text(encoding="utf-8").split("evidence:\n")[0]
    text = yaml.safe_dump({"evidence": evidence}, sort_keys=False, allow_unicode=True, width=1000)
    path.write_text(before + text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
