"""Copies one hlatctl run to one MLflow run: parameters, metrics, tags, artifacts, status.

This module turns events and files into MLflow's rows and keeps the cursor, which records how far they have been copied.
``flows.tracking.mlflow_sync`` decides when to copy, and handles an MLflow that doesn't answer.

When an attempt starts from step k, later steps of earlier attempts are superseded. MLflow's API can't remove values, so
they are removed from its database if that is an SQLite file. On a tracking server a repeated step keeps both values;
the later one has the later time and counts as the latest.

A few items of each task of a milestone are shown as a table: what the model was asked, and what it answered. MLflow's
page shows a JSON artifact as a table if the run's tag ``mlflow.loggedArtifacts`` names it. MLflow's ``log_table``
writes the same, but imports pandas and reads earlier rows again. All items are in the run's directory.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.load import flatten
from conf.of_run import of_run
from conf.schema import Config
from flows.runtime.context import is_simulated
from flows.tracking import mlflow_client
from flows.tracking.mirrors.base import Attempts
from flows.tracking.mirrors.points import chances, point, scores
from flows.tracking.mlflow_steps import Shown, copy_amendments
from flows.tracking.mlflow_sweep import trial_tags
from hlatctl.report import items as item_file
from hlatctl.run import contract, files
from hlatctl.run import contract as contract_record
from hlatctl.run.errors import HlatctlError
from hlatctl.run.files import DAMAGED
from hlatctl.run.journal import FLOW_WRITER, OPERATOR_WRITER, Event, JournalTail, writer_events
from hlatctl.run.labels import LABELLED, LabelState, apply, marked
from hlatctl.run.paths import RunPaths, mlflow_artifacts
from hlatctl.run.redact import hide
from hlatctl.run.state import MilestoneState
from hlatctl.units import duration, utc

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Metric, Run
    from mlflow.tracking import MlflowClient


_NAME, _DESCRIPTION = "mlflow.runName", "mlflow.note.content"


def copy_labels(client: MlflowClient, mlflow_run_id: str, run: RunPaths, new: list[Event], *, simulated: bool) -> None:
    """Set name, tags and description from the whole journal, if one of the new events changes them."""
    if not any(event["kind"] == LABELLED for event in new):
        return
    labels = LabelState()
    for event in writer_events(run, OPERATOR_WRITER):
        if event["kind"] == LABELLED:
            apply(labels, event)
    client.set_tag(mlflow_run_id, _NAME, marked(labels.name or run.run_id, simulated=simulated))
    for key, value in labels.tags.items():
        client.set_tag(mlflow_run_id, key, value)
    kept = client.get_run(mlflow_run_id).data.tags
    for key in {key for event in new for key in event.get("untag", [])} - set(labels.tags):
        if key in kept:
            client.delete_tag(mlflow_run_id, key)
    if labels.notes:
        text = "\n\n".join(f"{utc(note.time_unix_s)}, {note.by}: {note.text}" for note in labels.notes)
        client.set_tag(mlflow_run_id, _DESCRIPTION, text)


#: Metrics of steps by the step, and by tokens.
BY_STEP, BY_TOKENS = "train/", "by_tokens/train_"
_TIMEOUT_S = 30.0
_COLUMNS = "key, value, timestamp, step, is_nan, run_uuid"
_SUPERSEDED = "run_uuid = :run AND ((key GLOB :by_step AND step > :step) OR (key GLOB :by_tokens AND step > :tokens))"


@dataclass(frozen=True)
class Rewind:
    """The last copied step that still counts, and its tokens."""

    step: int
    tokens: int


def new_steps(
    events: Iterable[Event], *, last_step: int, attempt: int, tokens_per_step: int
) -> tuple[list[Event], Rewind | None, int]:
    """Find the steps to copy, and whether copied steps were superseded.

    Args:
        events: new events in order of time.
        last_step: newest step that has been copied.
        attempt: the newest attempt seen so far.
        tokens_per_step: for a ``train_started`` without tokens.

    Returns:
        The step events to copy; the step to go back to first, or None; the newest attempt now.
    """
    steps: dict[int, Event] = {}
    rewind = None
    for event in events:
        if event["kind"] == "train_started":
            step, attempt = int(event.get("resumed_from_step") or 0), max(attempt, event["attempt"])
            steps = {number: kept for number, kept in steps.items() if number <= step}
            if step < last_step:
                last_step = step
                rewind = Rewind(step, int(event.get("tokens") or step * tokens_per_step))
        # Late lines of a superseded attempt don't count.
        elif event["kind"] == "step" and event["attempt"] >= attempt and event["step"] > last_step:
            steps[event["step"]] = event
    return [steps[number] for number in sorted(steps)], rewind, attempt


def remove(database: Path, mlflow_run_id: str, to: Rewind) -> None:
    """Remove the metrics of superseded steps; idempotent.

    Raises:
        sqlite3.Error: the database can't be written.
    """
    values = {
        "run": mlflow_run_id,
        "step": to.step,
        "tokens": to.tokens,
        "by_step": f"{BY_STEP}*",
        "by_tokens": f"{BY_TOKENS}*",
    }
    with closing(sqlite3.connect(database, timeout=_TIMEOUT_S)) as connection, connection:
        for statement in _statements():
            connection.execute(statement, values)


def _statements() -> Iterator[str]:
    yield f"DELETE FROM metrics WHERE {_SUPERSEDED}"
    yield f"DELETE FROM latest_metrics WHERE {_SUPERSEDED}"
    # With MAX, SQLite takes the other columns from the row of the maximum.
    yield (
        f"INSERT OR IGNORE INTO latest_metrics ({_COLUMNS}) SELECT key, value, timestamp, MAX(step), is_nan, run_uuid "
        "FROM metrics WHERE run_uuid = :run AND (key GLOB :by_step OR key GLOB :by_tokens) GROUP BY key"
    )


#: Seconds between two lines.
_EVERY_S = 5.0
#: Number of newest lines that determine the rate, because it depends on what else the machine does.
_NEWEST = 6


class Progress:
    """Prints a line with steps, rate and time left every 5 s.

    Args:
        total_bytes: size of the journal.
        say: called with each line.
        now_s: the clock.
    """

    def __init__(
        self, total_bytes: int, say: Callable[[str], None], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._total_bytes, self._say, self._now_s = total_bytes, say, now_s
        self._points: deque[tuple[float, int, int]] = deque(maxlen=_NEWEST)

    def reached(self, step: int, done_bytes: int) -> None:
        """Report that everything up to this step, and this many bytes of the journal, is copied."""
        now_s = self._now_s()
        if not self._points:
            self._points.append((now_s, step, done_bytes))
            return
        if now_s - self._points[-1][0] < _EVERY_S:
            return
        self._points.append((now_s, step, done_bytes))
        since_s, since_step, since_bytes = self._points[0]
        share = done_bytes / max(self._total_bytes, done_bytes, 1)
        text = f"step {step:,} ({share:.0%} of the journal), {(step - since_step) / (now_s - since_s):,.0f} steps/s"
        if done_bytes > since_bytes:
            left_s = (now_s - since_s) / (done_bytes - since_bytes) * max(0, self._total_bytes - done_bytes)
            text += f", {duration(left_s)} left"
        self._say(text)


MetricRow = tuple[str, float, int, int]
"""Key, value, time in Unix milliseconds, step. MLflow drops a row that is equal to another in all four."""

#: Metrics of a whole run by their place in the report's ``numbers.json``.
_END_METRICS = {
    "run/goodput": ("ledger", "uptime_fraction"),
    "run/effective_training_time_ratio": ("ledger", "ettr_fraction"),
    "run/wall_s": ("ledger", "wall_s"),
    "run/process_hours": ("ledger", "process_hours"),
    "run/cost_usd": ("ledger", "cost_usd"),
    "run/mfu": ("mfu_fraction",),
    "run/tokens_per_s": ("tokens_per_s",),
    "run/peak_memory_bytes": ("peak_memory_bytes",),
    "run/data_wait_fraction": ("data_wait_fraction",),
    "run/lost_steps": ("lost_steps",),
    "run/gradient_spikes": ("gradient_spikes",),
    "run/loss": ("last_loss",),
    "run/validation_loss": ("validation_loss",),
}
#: MLflow's maximum.
_DIGEST_CHARS = 36


def checkpoint_rows(event: Event, shift_s: float) -> list[MetricRow]:
    """Return the rows of a ``checkpoint_written`` event by step: time to write it, time that training waited, size."""
    time_ms, step = int((event["time_unix_s"] + shift_s) * 1000), int(event["step"])
    fields = ("wall_s", "stall_s", "bytes")
    return [(f"checkpoint/{name}", float(event[name]), time_ms, step) for name in fields if event.get(name) is not None]


def end_metrics(run: RunPaths) -> dict[str, float]:
    """Return the numbers of a run's report; none if the report is missing or damaged."""
    try:
        numbers = json.loads((run.report / "numbers.json").read_text(encoding="utf-8"))
        found = {name: _at(numbers, place) for name, place in _END_METRICS.items()}
        found["run/restarts"] = max(0, len(numbers["attempts"]) - 1)
    except (OSError, *DAMAGED):
        return {}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def datasets(run: RunPaths) -> list[DatasetInput]:
    """Return the sources of a run's corpus with their fingerprints; none before they are prepared."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    try:
        sources = list(files.read_sealed_json(run.dataset)["sources"])
        return [
            DatasetInput(
                Dataset(
                    name=str(source["path"]).rstrip("/").rpartition("/")[2],
                    digest=str(source["fingerprint"])[:_DIGEST_CHARS],
                    source_type="remote" if "://" in str(source["path"]) else "local",
                    source=json.dumps({"uri": source["path"]}),
                    profile=json.dumps({key: source.get(key) for key in ("documents", "rows", "text_bytes")}),
                ),
                [InputTag("mlflow.data.context", "training")],
            )
            for source in sources
        ]
    except (OSError, *DAMAGED):
        return []


def _at(record: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        record = record.get(key) if isinstance(record, dict) else None
    return record


COLUMNS = ("task", "item", "metric", "value", "prompt", "choices", "answer", "target")
#: Rows of a task and of a table, and characters of a text: a table has at most 1.6 MB.
_TASK_ROWS, _ROWS, _CHARS = 5, 200, 2_000
_TAG = "mlflow.loggedArtifacts"
#: MLflow's limit for a tag is 8,000 characters.
_TABLES = 80


def copy_items(client: MlflowClient, mlflow_run_id: str, run: RunPaths, folder: Path) -> None:
    """Add the table of a folder of results, ``tokens-N`` or ``tokens-N/contract-M``, or replace an earlier one."""
    milestone, _, number = folder.relative_to(run.evals).as_posix().partition("/")
    tokens = int(milestone.removeprefix("tokens-"))
    contract = number.removeprefix("contract-")
    rows = table(run, MilestoneState(milestone_tokens=tokens, step=0, contract=contract))
    if not rows:
        return
    name = "-".join(filter(None, ["tokens", str(tokens), contract_record.folder(contract)]))
    path = f"items/{name}.json"
    content = json.dumps({"columns": COLUMNS, "data": rows}, ensure_ascii=False)
    client.log_text(mlflow_run_id, hide(content), path)
    entry = {"path": path, "type": "table"}
    known = json.loads(client.get_run(mlflow_run_id).data.tags.get(_TAG, "[]"))
    if entry not in known:
        client.set_tag(mlflow_run_id, _TAG, json.dumps([*known, entry][-_TABLES:]))


def table(run: RunPaths, milestone: MilestoneState) -> list[list[Any]]:
    """Return the first items of each task, a row of :data:`COLUMNS` each; damaged files are left out."""
    tasks = item_file.tasks_of(run, milestone.milestone_tokens, milestone.contract)
    most = max(1, min(_TASK_ROWS, _ROWS // max(1, len(tasks))))
    return list(itertools.chain.from_iterable(_rows(run, milestone, task, most) for task in tasks[:_ROWS]))


def _rows(run: RunPaths, milestone: MilestoneState, task: str, most: int) -> list[list[Any]]:
    try:
        items = item_file.read(run, milestone, task, right=None, limit=most)
    except HlatctlError:
        return []
    return [
        [
            *(item.task, item.item, item.metric, item.value, item.prompt[-_CHARS:]),
            _choices(item.choices, item.loglikelihoods)[:_CHARS],
            *(item.answer[:_CHARS], item.target[:_CHARS]),
        ]
        for item in items
    ]


def _choices(choices: Sequence[str], loglikelihoods: Sequence[float]) -> str:
    best = max(loglikelihoods, default=0.0)
    ranked = zip(choices, loglikelihoods, strict=True)
    return "\n".join(f"{'>' if value == best else ' '} {value:.3f} {choice.strip()}" for choice, value in ranked)


#: Peak memory shows more than the current one, and each value costs MLflow time.
_LEFT_OUT = "memory_bytes"

RUN_ID_TAG = "hlatctl.run_id"
CREATED_TAG = "hlatctl.created_unix_s"
LAST_STEP_TAG = "hlatctl.last_step"

#: Number of events per copy. The cursor is written after each copy, so the memory doesn't grow with the run.
_EVENTS_AT_ONCE = 1_000
#: MLflow's REST API accepts 1,000 metrics and tags per request. A batch's metrics must be in its tag's request.
_MAX_METRICS_PER_BATCH = 999


@dataclass
class Cursor:
    """``mirror.json``: how far a run has been copied.

    Args:
        tracking_uri: MLflow's address; a different address starts over.
        mlflow_run_id, experiment_id: ids of the run there.
        offsets: copied bytes by journal file stem.
        last_step: last optimizer step copied; earlier steps are copied again only if training goes back.
        attempt: the newest attempt that has started.
        artifacts: ``[bytes, mtime_ns]`` of each uploaded file.
        created_unix_s: the run's time of creation in the journal.
        shift_s: seconds to add to the journal's times to get real ones. The journals of all simulated runs begin at the
            same virtual time; their files have real times.
    """

    tracking_uri: str
    mlflow_run_id: str = ""
    experiment_id: str = ""
    offsets: dict[str, int] = field(default_factory=dict)
    last_step: int = 0
    attempt: int = 0
    artifacts: dict[str, list[int]] = field(default_factory=dict)
    created_unix_s: float = 0.0
    shift_s: float = 0.0

    @classmethod
    def read(cls, path: Path, tracking_uri: str) -> Cursor:
        """Read the cursor of the last copy; return a new one if it is missing, damaged or of another address."""
        try:
            cursor = cls(**files.read_json(path))
            cursor.offsets = {str(name): int(offset) for name, offset in cursor.offsets.items()}
            cursor.last_step, cursor.attempt = int(cursor.last_step), int(cursor.attempt)
            cursor.artifacts = dict(cursor.artifacts)
        except (OSError, *DAMAGED):
            return cls(tracking_uri)
        return cursor if cursor.tracking_uri == tracking_uri else cls(tracking_uri)


def step_rows(event: Event, shift_s: float = 0.0) -> list[MetricRow]:
    """Return the rows of a ``step`` event by step, and the loss by tokens too; ``Cursor`` explains the shift."""
    one = point(event, shift_s)
    time_ms = int(one.time_unix_s * 1000)
    rows = [(f"{BY_STEP}{name}", value, time_ms, one.step) for name, value in one.values.items() if name != _LEFT_OUT]
    if "loss" in one.values and "tokens" in event:
        rows.append((f"{BY_TOKENS}loss", one.values["loss"], time_ms, one.tokens))
    return rows


def eval_rows(event: Event, own_contract: str = "", shift_s: float = 0.0) -> list[MetricRow]:
    """Return the rows of an ``eval_finished`` event by step and by milestone tokens.

    Args:
        own_contract: the run's contract; scores under another contract get separate metrics.
        shift_s: see ``Cursor``.
    """
    found = scores(event, own_contract, shift_s)
    time_ms = int(found.time_unix_s * 1000)
    rows: list[MetricRow] = []
    for name, value in found.values.items():
        rows.append((f"{found.group}/{name}", value, time_ms, found.step))
        rows.append((f"by_tokens/{found.group}_{name}", value, time_ms, found.tokens))
    return rows


class MirrorRun:
    """Copies one run to one MLflow."""

    def __init__(self, run: RunPaths, config: Config, client: MlflowClient, uri: str) -> None:
        self._run, self._config, self._client = run, config, client
        self._database = Path(uri.removeprefix(mlflow_client.SQLITE)) if uri.startswith(mlflow_client.SQLITE) else None
        self._cursor = Cursor.read(run.mirror, hide(uri))
        self._shown = Shown(config.total_steps)

    def copy_new(self, say: Callable[[str], None]) -> int:
        """Copy new events and files; return the number of events that were missing in MLflow.

        Args:
            say: called with the progress of a long copy.
        """
        if not self._still_there():
            self._cursor = Cursor(self._cursor.tracking_uri)
        tail, copied = JournalTail(self._run, self._cursor.offsets, wanted=self._shown.line), 0
        progress = Progress(sum(path.stat().st_size for path in self._run.journal.glob("*.jsonl")), say)
        stream, attempts = tail.stream(), None
        while events := list(itertools.islice(stream, _EVENTS_AT_ONCE)):
            if not self._cursor.mlflow_run_id and not self._find_or_create(events):
                return 0
            if attempts is None and len(events) == _EVENTS_AT_ONCE:  # later ones may supersede them
                attempts = Attempts.of(self._run)
            copied += self._log_events(events, attempts)
            self._update_status(events)
            self._cursor.offsets = tail.offsets
            files.write_json(self._run.mirror, asdict(self._cursor))
            progress.reached(self._cursor.last_step, tail.bytes_read)
        if self._cursor.mlflow_run_id and self._upload_artifacts():
            files.write_json(self._run.mirror, asdict(self._cursor))
        return copied

    def _still_there(self) -> bool:
        """Return whether the known MLflow run still exists; people delete runs and databases."""
        from mlflow.exceptions import MlflowException

        if not self._cursor.mlflow_run_id:
            return True
        try:
            return self._client.get_run(self._cursor.mlflow_run_id).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def _find_or_create(self, events: list[Event]) -> bool:
        """Find or create the MLflow run; return False if the journal has no ``run_created`` yet."""
        created = next((event for event in events if event["kind"] == "run_created"), None)
        if created is None:
            return False
        self._cursor.created_unix_s = float(created["time_unix_s"])
        if created.get("simulated"):
            self._cursor.shift_s = self._run.config.stat().st_mtime - self._cursor.created_unix_s
        name = marked(self._config.tracking.experiment, simulated=bool(created.get("simulated")))
        experiment_id = self._experiment_id(name)
        identity = {RUN_ID_TAG: self._run.run_id, CREATED_TAG: repr(created["time_unix_s"])}
        known = mlflow_client.find_run(self._client, experiment_id, identity)
        if known:
            self._cursor.last_step = int(known.data.tags.get(LAST_STEP_TAG, 0))
        else:
            known = self._create(experiment_id, created, identity)
        self._cursor.mlflow_run_id, self._cursor.experiment_id = known.info.run_id, str(experiment_id)
        mlflow_client.log_params(self._client, self._cursor.mlflow_run_id, flatten(of_run(self._run, number=0)))
        return True

    def _create(self, experiment_id: str, created: Event, identity: dict[str, str]) -> Run:
        simulated = bool(created.get("simulated", False))
        tags = identity | {"hlatctl.simulated": str(simulated).lower()}
        tags |= trial_tags(self._client, experiment_id, self._run.root.parent, created) | self._provenance_tags()
        start_ms = int((created["time_unix_s"] + self._cursor.shift_s) * 1000)
        return self._client.create_run(experiment_id, start_ms, tags, marked(self._run.run_id, simulated=simulated))

    def _experiment_id(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment:
            return str(experiment.experiment_id)
        # A server decides itself where it keeps artifacts.
        location = mlflow_artifacts(self._run.root.parent.absolute()).as_uri() if self._database else None
        return self._client.create_experiment(name, location)

    def _provenance_tags(self) -> dict[str, str]:
        try:
            provenance = dict(files.read_json(self._run.provenance))
        except (OSError, ValueError, TypeError):
            return {}
        tags = {
            "mlflow.source.git.commit": (provenance.get("git") or {}).get("commit"),
            "mlflow.user": provenance.get("user"),
            "hlatctl.python": str(provenance.get("python", "")).split(" ")[0],
            "hlatctl.host": (provenance.get("host") or {}).get("name"),
        }
        if self._config.fork.run is not None:
            tags |= {"hlatctl.parent": self._config.fork.run, "hlatctl.parent_step": self._config.fork.step}
        return {name: str(value) for name, value in tags.items() if value}

    def _log_events(self, events: list[Event], attempts: Attempts | None) -> int:
        """Copy events; return how many were missing in MLflow.

        Args:
            events: new events in order of time.
            attempts: decide which steps count in the end; None: no further events are known that may supersede steps.
        """
        from mlflow.entities import Metric

        all_steps = sum(1 for event in events if event["kind"] == "step")
        steps = self._new_steps(events)
        steps = [
            step for step in steps if self._shown.step(step["step"]) and (attempts is None or attempts.counts(step))
        ]
        evals = [event for event in events if event["kind"] == "eval_finished"]
        own = contract.own_contracts(self._run) if evals else ""
        groups = [[Metric(*row) for row in step_rows(event, self._cursor.shift_s)] for event in steps]
        saved = [event for event in events if event["kind"] == "checkpoint_written"]
        groups += [[Metric(*row)] for event in saved for row in checkpoint_rows(event, self._cursor.shift_s)]
        groups += [[Metric(*row)] for event in evals for row in eval_rows(event, own, self._cursor.shift_s)]
        for batch in _batches(groups):
            self._log_metrics(batch)
        self._tag_chances(evals)
        return len(events) - all_steps + len(steps)

    def _new_steps(self, events: list[Event]) -> list[Event]:
        """Remove superseded steps from MLflow and return the steps to copy."""
        cursor = self._cursor
        steps, rewind, cursor.attempt = new_steps(
            events, last_step=cursor.last_step, attempt=cursor.attempt, tokens_per_step=self._config.tokens_per_step
        )
        if rewind:
            cursor.last_step = rewind.step
            if self._database:
                remove(self._database, cursor.mlflow_run_id, rewind)
        return steps

    def _log_metrics(self, batch: list[Metric]) -> None:
        from mlflow.entities import RunTag

        steps = [metric.step for metric in batch if metric.key.startswith(BY_STEP)]
        self._cursor.last_step = max(steps, default=self._cursor.last_step)
        tag = RunTag(LAST_STEP_TAG, str(self._cursor.last_step))
        self._client.log_batch(self._cursor.mlflow_run_id, metrics=batch, tags=[tag])

    def _tag_chances(self, evals: list[Event]) -> None:
        from mlflow.entities import RunTag

        tags = {f"chance.{name}": f"{value:.6g}" for event in evals for name, value in chances(event).items()}
        if tags:
            self._client.log_batch(self._cursor.mlflow_run_id, tags=[RunTag(*tag) for tag in tags.items()])

    def _update_status(self, events: list[Event]) -> None:
        run_id = self._cursor.mlflow_run_id
        if any(event["kind"] == "stage_finished" and event.get("stage") == "provenance" for event in events):
            for name, value in self._provenance_tags().items():
                self._client.set_tag(run_id, name, value)
        if any(event["kind"] == "stage_finished" and event.get("stage") == "data" for event in events):
            self._client.log_inputs(run_id, datasets(self._run))
        copy_amendments(self._client, run_id, self._run, events)
        copy_labels(self._client, run_id, self._run, events, simulated=is_simulated(self._config))
        newest = next((e for e in reversed(events) if e["kind"] in ("head_started", "run_finished")), None)
        if newest is None:
            return
        if newest["kind"] == "head_started":
            self._client.set_tag(run_id, "hlatctl.outcome", "running")
            self._client.update_run(run_id, status="RUNNING")
            return
        self._log_end(newest)

    def _log_end(self, newest: Event) -> None:
        """Set the final status, and the numbers of the report, which was written before."""
        from mlflow.entities import Metric

        run_id = self._cursor.mlflow_run_id
        outcome = str(newest.get("outcome", ""))
        self._client.set_tag(run_id, "hlatctl.outcome", outcome)
        end_unix_s = newest["time_unix_s"]
        if self._cursor.shift_s:
            played_s = end_unix_s - self._cursor.created_unix_s
            self._client.set_tag(run_id, "hlatctl.simulated_duration", duration(played_s))
            end_unix_s = (self._run.journal / f"{FLOW_WRITER}.jsonl").stat().st_mtime
        end_ms = int(end_unix_s * 1000)
        step = int(newest.get("step", 0))
        numbers = [Metric(name, value, end_ms, step) for name, value in end_metrics(self._run).items()]
        self._client.log_batch(run_id, metrics=numbers)
        self._client.set_terminated(run_id, status=mlflow_client.STATUS.get(outcome, "FAILED"), end_time=end_ms)

    def _upload_artifacts(self) -> bool:
        uploaded = False
        for path in self._artifacts():
            name = path.relative_to(self._run.root).as_posix()
            version = [path.stat().st_size, path.stat().st_mtime_ns]
            if self._cursor.artifacts.get(name) != version:
                self._upload(path, name)
                if path.name == "results.json":
                    copy_items(self._client, self._cursor.mlflow_run_id, self._run, path.parent)
                self._cursor.artifacts[name] = version
                uploaded = True
        return uploaded

    def _artifacts(self) -> list[Path]:
        run = self._run
        paths = [run.config, run.provenance, *run.evals.rglob("results.json")]
        paths += [path for path in run.report.rglob("*") if not path.name.startswith(".")]
        return [path for path in paths if path.is_file()]

    def _upload(self, path: Path, name: str) -> None:
        if path in (self._run.config, self._run.provenance):
            # Both repeat the command line, which may contain an address with a password.
            self._client.log_text(self._cursor.mlflow_run_id, hide(path.read_text("utf-8")), name)
        else:
            folder = Path(name).parent.as_posix()
            self._client.log_artifact(self._cursor.mlflow_run_id, str(path), None if folder == "." else folder)


def _batches(groups: Iterable[list[Metric]]) -> Iterator[list[Metric]]:
    """Join groups into batches; a group (the rows of one event) is never split."""
    batch: list[Metric] = []
    for group in groups:
        if batch and len(batch) + len(group) > _MAX_METRICS_PER_BATCH:
            yield batch
            batch = []
        batch.extend(group)
    if batch:
        yield batch
