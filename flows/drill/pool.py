"""The pool of faults: a file for each in ``planted/``, with how it is planted, what must follow, and what it leaves.

``FAULTS`` has them by name. Another installed package adds its own by entry points of the group ``hlatctl.faults``.
Each refers to a :class:`Fault`, which :func:`read` makes from such a file.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from conf.schema import Config
from flows.recovery.failure_causes import Cause
from flows.recovery.policy import Action
from hlatctl.run.registry import Registry, Row

_FOLDER = Path(__file__).with_name("planted")


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What must follow a fault.

    Args:
        cause: the cause of the attempt's end; empty: training continues.
        blames_node: the node with the fault is blamed. Otherwise nobody is.
        action: what follows in a run with a spare node; empty: nothing, because training continues.
    """

    cause: Cause | Literal[""] = ""
    blames_node: bool = False
    action: Action | Literal[""] = ""


@dataclass(frozen=True, kw_only=True)
class NodeEvidence:
    """What one node left.

    Args:
        code: exit code in the record of its end; None: it wrote none.
        ended_s: time of its end by its own clock, from an arbitrary begin.
        asked_to_stop: it was asked to stop before.
        oom_kills: processes that its kernel killed because memory ran out.
        starts: it wrote a record of its start.
        log: the end of its log.
        stacks: what its ranks wrote when the job hung; None: nothing.
        collectives: number of the newest collective that its rank had begun; None: not recorded.
    """

    code: int | None = None
    ended_s: float = 0.0
    asked_to_stop: bool = False
    oom_kills: int = 0
    starts: bool = True
    log: str = ""
    stacks: str | None = None
    collectives: int | None = None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What an attempt with the fault left: of two nodes n1 and n2, of which n2 has the fault, or of one.

    Args:
        recorded: where it was recorded; empty: it is put together from the published texts of ``source``.
        source: addresses of the published texts.
        live: the scheduler's state of a job that has not ended; empty: it has.
        silent_s: seconds without a sign of life.
        last_step: the attempt's last step, after the checkpoints of steps 5 and 10; 0: it made none.
        events: the events of the attempt that matter, without times and writers.
        train_stopped: the reason in the trainer's last event.
        error: the error that the trainer left for the driver; empty: none.
        verdict, reason: the scheduler's.
        exit_code: exit code of the whole job; None: it left none.
        down: nodes that the scheduler reports as down.
        nodes: what each node left.
    """

    recorded: str = ""
    source: tuple[str, ...] = ()
    live: str = ""
    silent_s: float = 0.0
    last_step: int = 14
    events: tuple[dict[str, Any], ...] = ()
    train_stopped: str = ""
    error: dict[str, str] = field(default_factory=dict)
    verdict: str = ""
    reason: str = ""
    exit_code: int | None = None
    down: tuple[str, ...] = ()
    nodes: tuple[NodeEvidence, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Fault(Row):
    """A fault: ``code(arena, servers, **options)`` injects it into a running run and returns what was seen.

    An empty ``code`` marks a fault that needs hardware or administrators, so that a drill can't inject it.

    Args:
        title: display name.
        options: arguments of ``code``.
        skip: ``skip(config)`` returns why a configuration doesn't allow it; empty: all do.
        needs: what it needs, in words, if a drill can't inject it.
        standard: a drill injects it unless others are named.
        small_disk: it needs a separate run on a small disk.
        scheduler: it needs a scheduler; a drill on this machine skips it.
        inside: it runs a statement inside a rank, which has to be prepared when the run starts.
        expects: what must follow.
        evidence: what it leaves behind, for the table of confusions.
    """

    title: str
    options: Mapping[str, Any] = field(default_factory=dict)
    skip: str = ""
    needs: str = ""
    standard: bool = False
    small_disk: bool = False
    scheduler: bool = False
    inside: bool = False
    expects: Expected = Expected()
    evidence: Evidence = Evidence()


def read(path: Path) -> Fault:
    """Return the fault of a file.

    Raises:
        TypeError: the file has an unknown field, or lacks one.
    """
    with path.open(encoding="utf-8") as file:
        fields = yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    evidence: dict[str, Any] = dict(fields.pop("evidence", {}))
    evidence["nodes"] = tuple(NodeEvidence(**node) for node in evidence.get("nodes", ()))
    evidence |= {name: tuple(evidence.get(name, ())) for name in ("source", "events", "down")}
    expects = Expected(**fields.pop("expects", {}))
    return Fault(expects=expects, evidence=Evidence(**evidence), **fields)


class _Pool(Mapping[str, Fault]):
    """The faults of this folder, each read when it is needed."""

    def __iter__(self) -> Iterator[str]:
        return iter(_names())

    def __len__(self) -> int:
        return len(_names())

    def __contains__(self, name: object) -> bool:
        return name in _names()

    def __getitem__(self, name: str) -> Fault:
        if name not in _names():
            raise KeyError(name)
        return _fault(name)


@functools.cache
def _names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


@functools.cache
def _fault(name: str) -> Fault:
    return read(path_of(name))


def path_of(name: str) -> Path:
    """Return the file of a fault of this project."""
    return _FOLDER / f"{name}.yaml"


FAULTS = Registry("--fault", "hlatctl.faults", Fault, _Pool())


def why_not(name: str, config: Config) -> str:
    """Return why a configuration doesn't allow a fault; empty if it does."""
    fault = FAULTS[name]
    if not fault.code:
        return f"needs {fault.needs}"
    check = FAULTS.part(name, "skip")
    reason: str = check(config) if check else ""
    return reason


def offered(config: Config) -> list[str]:
    """Return the faults that a drill on this configuration's cluster injects by default."""
    here = config.cluster.jobs_run == "here"
    return [name for name in FAULTS if FAULTS[name].standard and not (FAULTS[name].scheduler and here)]
