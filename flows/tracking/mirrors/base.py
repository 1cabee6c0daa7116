"""The interface of a mirror, which shows a run's steps, scores, labels, files and outcome at one service.

``flows.tracking.mirrors.copier`` calls a mirror in the order of the journal and gives it nothing twice. A mirror only
needs to know where to continue. What only some services can show is a capability: an attribute of :class:`Service`,
or a method that does nothing by default.

A mirror gets all steps of a run of up to 100,000 steps, and at most as many of a longer one. The selection depends only
on a step's number and on the run's planned length, so a run that is copied while it trains and one that is copied at
its end have the same steps. The journal has all of them.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.schema import Config
from conf.tracking import FIRST_STEPS, every_steps
from hlatctl.run.evaluations import headlines
from hlatctl.run.journal import Event, no_steps
from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import name_of_user
from hlatctl.run.state import AmendmentState
from hlatctl.run.step_metrics import MOST_OTHERS, STEP_METRICS, others
from hlatctl.units import number

#: Tokens/s/device follow from tokens/s.
_FIELDS = tuple(metric.name for metric in STEP_METRICS if metric.mirrored)
_STEP = re.compile(rb'"step": ?(\d+)')


@dataclass(frozen=True, kw_only=True)
class About:
    """What doesn't change in a run.

    Args:
        run_id: the run's id, also at the service.
        root: the run directory.
        simulated: nothing was trained.
        sweep: the sweep of which it is a trial, or empty.
        trial: number of the trial; None if it is none.
        created_unix_s: time of its creation.
        journal_created_unix_s: the same in the journal's time, which is virtual in a simulated run.
        config: values of its first configuration by dotted key, without secrets.
    """

    run_id: str
    root: Path
    simulated: bool
    sweep: str
    trial: int | None
    created_unix_s: float
    journal_created_unix_s: float
    config: Mapping[str, bool | int | float | str]

    @property
    def shift_s(self) -> float:
        """Seconds to add to the journal's times. The journals of all simulated runs begin at the same virtual time."""
        return self.created_unix_s - self.journal_created_unix_s


@dataclass(frozen=True)
class Point:
    """A training step.

    Args:
        step: the optimizer step.
        tokens: tokens consumed up to it.
        time_unix_s: time of its end.
        values: known values by field of its event.
    """

    step: int
    tokens: int
    time_unix_s: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Scores:
    """The scores of one evaluation of a milestone.

    Args:
        step, tokens: step and tokens of the milestone.
        time_unix_s: time of the evaluation.
        group: ``eval``, or ``eval_contract_<id>`` under another contract than the run's, which isn't comparable.
        values: scores by task.
        chances: known scores of guessing, by task.
    """

    step: int
    tokens: int
    time_unix_s: float
    group: str
    values: Mapping[str, float]
    chances: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A key that identifies the evaluation among those of its run."""
        return f"{self.tokens} {self.group} {self.time_unix_s}"


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What people have written about a run, and how its configuration has changed.

    Args:
        name: the run's name, or its id; marked if it is simulated.
        tags: values by key.
        removed: keys of removed tags.
        notes: one paragraph each, with time and author.
        amended: the values of each amended key in order, as text.
        facts: commit, user and similar by name, as soon as they are recorded.
    """

    name: str
    tags: Mapping[str, str]
    removed: Sequence[str]
    notes: Sequence[str]
    amended: Mapping[str, str]
    facts: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The state of a run.

    Args:
        status: ``running``, ``finished``, ``failed`` or ``stopped``.
        message: reason; may be empty.
        step: its newest step.
        time_unix_s: time of its end, or of the newest event of a run that has not ended.
    """

    status: str
    message: str
    step: int
    time_unix_s: float


class Mirror(ABC):
    """One run at one service.

    Every method raises ``OSError`` or an exception of the service's library if the service does not accept the data.
    The mirror is then closed. Another one is opened later and gets what the service lacks.
    """

    #: The newest step that the service has; 0: none.
    last_step: int
    #: The service has nothing of the run, whatever the cursor says.
    is_new = False

    @abstractmethod
    def steps(self, points: Sequence[Point]) -> None:
        """Add steps, in order, each later than the last one."""

    @abstractmethod
    def rewind(self, step: int, tokens: int) -> bool:
        """Remove the steps after this one, which are trained again. ``last_step`` is then the last one that is valid.

        Args:
            step: the last step that counts.
            tokens: tokens consumed up to this step.

        Returns:
            Whether scores that were added after it are removed too.
        """

    @abstractmethod
    def scores(self, scores: Scores) -> None:
        """Add the scores of a milestone, which may be one of an earlier step."""

    @abstractmethod
    def labels(self, labels: Labels) -> None:
        """Replace the labels."""

    @abstractmethod
    def outcome(self, outcome: Outcome) -> None:
        """Replace the outcome."""

    def further(self, event: Event) -> None:  # noqa: B027
        """Add what this service shows of an event for which there is no other method."""

    def file(self, path: Path, name: str) -> None:  # noqa: B027
        """Add a file of the run, or replace an earlier version; see ``Service.takes_files``."""

    @abstractmethod
    def flush(self) -> dict[str, Any]:
        """Hand over everything added so far; return what this mirror needs to continue from here, as JSON."""

    @abstractmethod
    def close(self) -> None:
        """Finish the hand-over and release everything."""


class Service(ABC):
    """A service for one run or sweep; ``code`` of a row of ``conf.tracking.MIRRORS`` makes it."""

    #: A mirror stays open while a run is followed. Otherwise it is opened for each copy, so that two processes can copy
    #: in turns.
    lasting = False
    #: It takes the run's configuration, provenance, results and report.
    takes_files = False
    #: It can register exported models.
    registers_models = False

    def __init__(self, run: RunPaths, config: Config) -> None:
        self.run, self.config = run, config

    @property
    def setting(self) -> str:
        """The configuration key and value that messages name; empty: ``tracking.mirrors``."""
        return ""

    @property
    @abstractmethod
    def target(self) -> str:
        """Its address, without a password. A run that is copied to another address is copied from its beginning."""

    @abstractmethod
    def open(self, about: About, kept: dict[str, Any], last_step: int) -> Mirror:
        """Open the run's mirror.

        Args:
            kept: what an earlier mirror has returned from ``flush``.
            last_step: newest step copied.
        """

    def beside(self, say: Callable[[str], None]) -> AbstractContextManager[Callable[[], None]]:
        """Return a block around the copying process of a run; it yields a function to call after each copy."""
        return nullcontext(lambda: None)

    def copy_sweep(self) -> None:
        """Copy a sweep's status and numbers; see ``MirrorKind.shows_sweeps``."""
        raise NotImplementedError

    def register(self, folder: Path, written: Mapping[str, Any]) -> str:
        """Register an exported model, given what the export has reported; return its name and version."""
        raise NotImplementedError


@dataclass(frozen=True)
class Shown:
    """The steps that mirrors get.

    Args:
        total_steps: the run's planned length.
    """

    total_steps: int

    @property
    def every(self) -> int:
        """The number of steps from one to the next."""
        return every_steps(self.total_steps)

    def step(self, step: int) -> bool:
        """Return whether mirrors get a step."""
        return step <= FIRST_STEPS or step % self.every == 0 or step == self.total_steps

    def line(self, line: bytes) -> bool:
        """Return whether a line of the journal must be read: a step that mirrors get, or another event."""
        if no_steps(line):
            return True
        number = _STEP.search(line)
        return number is None or self.step(int(number[1]))


class Attempts:
    """Which steps count: those before which no later attempt starts.

    Args:
        starts: the last step before each attempt by its number, and the tokens up to it. It is kept up to date.
    """

    def __init__(self, starts: dict[str, list[int]]) -> None:
        self._starts = starts
        self._last: dict[int, float] = {}

    @property
    def newest(self) -> int:
        """The newest attempt; 0: none has started."""
        return max(map(int, self._starts), default=0)

    def add(self, started: Event, tokens_per_step: int) -> tuple[int, int]:
        """Add a ``train_started`` event; return its step and tokens. Adding it again changes nothing."""
        step = int(started.get("resumed_from_step") or 0)
        tokens = int(started.get("tokens") or step * tokens_per_step)
        self._starts[str(int(started["attempt"]))] = [step, tokens]
        self._last.clear()
        return step, tokens

    def common(self) -> list[int] | None:
        """Return the last step that no attempt repeats, and its tokens; None if there is only one attempt."""
        first = min(map(int, self._starts), default=0)
        return min((start for number, start in self._starts.items() if int(number) > first), default=None)

    def counts(self, step: Event) -> bool:
        """Return whether no later attempt starts before this step."""
        attempt = int(step["attempt"])
        if attempt not in self._last:
            later = (start[0] for number, start in self._starts.items() if int(number) > attempt)
            self._last[attempt] = min(later, default=math.inf)
        return bool(step["step"] <= self._last[attempt])


def point(event: Event, shift_s: float) -> Point:
    """Return the data of a ``step`` event that mirrors get. The shift is added to its time."""
    names = (*_FIELDS, *others(event)[:MOST_OTHERS])
    values = {name: float(event[name]) for name in names if event.get(name) is not None}
    return Point(int(event["step"]), int(event.get("tokens") or 0), event["time_unix_s"] + shift_s, values)


def scores(event: Event, own_contract: str, shift_s: float) -> Scores:
    """Return the data of an ``eval_finished`` event that mirrors get.

    Args:
        own_contract: the run's contract; empty if it is not known.
        shift_s: seconds to add to its time.
    """
    contract, known = str(event.get("contract", "")), event.get("scores", {})
    group = f"eval_contract_{contract[:8]}" if own_contract and contract != own_contract else "eval"
    values = {_plain(task): float(score["value"]) for task, score in known.items() if score.get("value") is not None}
    found = {_plain(task): number(known[task], "chance") for task in headlines(known)}
    chances = {task: value for task, value in found.items() if math.isfinite(value)}
    time_unix_s = event["time_unix_s"] + shift_s
    return Scores(int(event["step"]), int(event["milestone_tokens"]), time_unix_s, group, values, chances)


def _plain(task: str) -> str:
    return re.sub(r"[^\w./ -]", "_", task)


def courses(amendments: list[AmendmentState]) -> dict[str, str]:
    """Return the values of each amended key in order: ``0.0003; from step 1201: 0.0001; pending: 5e-05``."""
    texts: dict[str, str] = {}
    for amendment in amendments:
        begins = "pending" if amendment.applied_step is None else f"from step {amendment.applied_step + 1}"
        for key, (old, new) in amendment.changes.items():
            texts[key] = f"{texts.get(key, old)}; {begins}: {new}"
    return texts


def origin_of(run: RunPaths, argv: Sequence[str]) -> dict[str, str]:
    """Return who made a run or a sweep, and by which command, without its arguments."""
    command = " ".join([Path(argv[0]).name, *argv[1:2]]) if argv else "hlatctl"
    return {"user": name_of_user(run.root.stat().st_uid), "source": command, "source_type": "LOCAL"}
