"""A run in MLflow: parameters, metrics, tags, datasets, artifacts, status; its sweep; a model that it exports.

When an attempt starts from step k, later steps of earlier attempts are superseded. MLflow's API can't remove values, so
they are removed from its database if that is an SQLite file. On a tracking server a repeated step keeps both values;
the later one has the later time and counts as the latest.

Nothing is logged twice. A copier that is killed sends the same rows again, and MLflow drops rows with equal key, step,
time and value. Each batch also sets the tag ``hlatctl.last_step``, which is the newest step that MLflow has.

A parameter in MLflow can't change, so each amended key has a tag with the sequence of its values.

A few items of each task of a milestone are shown as a table: what the model was asked, and what it answered. MLflow's
page shows a JSON artifact as a table if the run's tag ``mlflow.loggedArtifacts`` names it. MLflow's ``log_table``
writes the same, but imports pandas and reads earlier rows again. All items are in the run's directory.

A sweep is a run with its status, parameters and numbers, the parent of its trials' runs. The first trial that is copied
creates it.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.schema import Config
from flows.tracking import mlflow_client
from flows.tracking.mirrors.base import About, Labels, Mirror, Outcome, Point, Scores, Service, origin_of
from hlatctl.report import items as item_file
from hlatctl.report.sweep import best
from hlatctl.run import contract as contract_record
from hlatctl.run import files
from hlatctl.run.errors import HlatctlError
from hlatctl.run.files import DAMAGED
from hlatctl.run.journal import FLOW_WRITER, Event, read_events
from hlatctl.run.labels import marked
from hlatctl.run.lease import hold
from hlatctl.run.paths import RunPaths, SweepPaths, mlflow_artifacts
from hlatctl.run.redact import hide
from hlatctl.run.state import MilestoneState
from hlatctl.run.sweep import fold
from hlatctl.units import duration

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Metric
    from mlflow.tracking import MlflowClient


MetricRow = tuple[str, float, int, int]
"""Key, value, time in Unix milliseconds, step. MLflow drops a row that is equal to another in all four."""

#: Prefix of the metrics of steps. Each number is logged once: MLflow's charts take `train/tokens` as x axis too.
TRAIN = "train/"
#: Peak memory shows more than the current one, and each value costs MLflow time.
_LEFT_OUT = "memory_bytes"

LAST_STEP_TAG = "hlatctl.last_step"
_RUN_ID_TAG, _CREATED_TAG = "hlatctl.run_id", "hlatctl.created_unix_s"
_NAME, _DESCRIPTION = "mlflow.runName", "mlflow.note.content"
_FACTS = {
    "commit": "mlflow.source.git.commit",
    "user": "mlflow.user",
    "source": "mlflow.source.name",
    "source_type": "mlflow.source.type",
    "python": "hlatctl.python",
    "host": "hlatctl.host",
}
#: MLflow accepts tags of up to 8,000 bytes.
_TAG_CHARS = 2000
#: MLflow's REST API accepts 1,000 metrics and tags per request. A batch's metrics must be in its tag's request.
_MAX_METRICS_PER_BATCH = 999
#: MLflow's status by the outcome of a run or a sweep.
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "running": "RUNNING"}


class Mlflow(Service):
    """MLflow at ``tracking.mlflow_uri``."""

    takes_files = registers_models = True

    @property
    def setting(self) -> str:
        """The address."""
        return f"tracking.mlflow_uri={self.target}"

    @property
    def target(self) -> str:
        """The address."""
        return hide(mlflow_client.address(self.run, self.config))

    def open(self, about: About, kept: dict[str, Any], last_step: int) -> MlflowRun:
        """Find or create the run."""
        return MlflowRun(self.run, self.config, about, kept)

    def beside(self, say: Callable[[str], None]) -> AbstractContextManager[Callable[[], None]]:
        """Measure this machine if MLflow's own variable asks for it."""
        return mlflow_client.measuring(self.run, self.config, say)

    def copy_sweep(self) -> None:
        """Copy a sweep's status, parameters and numbers to its MLflow run; idempotent.

        Raises:
            StorageError: MLflow doesn't answer, or rejects a request.
        """
        with mlflow_client.connection(self.run, self.config) as client:
            copy_sweep(client, SweepPaths(self.run.root), self.config)

    def register(self, folder: Path, written: Mapping[str, Any]) -> str:
        """Register an exported model as a new version of ``tracking.register_model``, which is created if necessary.

        Args:
            folder: the export. MLflow stores its address, not its files.
            written: ``step``, ``dtype`` and ``parameters`` of the export.

        Returns:
            Name and version, such as ``hlat-7b version 3``.

        Raises:
            StorageError: MLflow doesn't answer, or rejects a request.
        """
        from mlflow.exceptions import MlflowException

        name = str(self.config.tracking.register_model)
        with mlflow_client.connection(self.run, self.config) as client:
            try:
                client.create_registered_model(name)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            version = client.create_model_version(
                name,
                source=folder.absolute().as_uri(),
                run_id=mlflow_client.copied_to(self.run)["run_id"],
                tags={f"hlatctl.{key}": str(written[key]) for key in ("step", "dtype", "parameters")},
                description=f"Step {written['step']:,} of run {self.run.run_id}, in Hugging Face format.",
            )
        return f"{name} version {version.version}"


class MlflowRun(Mirror):
    """A run in MLflow, which is created if it is missing."""

    def __init__(self, run: RunPaths, config: Config, about: About, kept: dict[str, Any]) -> None:
        self._run, self._about, self._kept = run, about, dict(kept)
        uri = mlflow_client.address(run, config)
        self._client = mlflow_client.connect(uri, run.root.parent)
        self._database = Path(uri.removeprefix(mlflow_client.SQLITE)) if uri.startswith(mlflow_client.SQLITE) else None
        self._rows: list[Metric] = []
        self.last_step = 0
        tags = mlflow_client.tags_of(self._client, kept["run_id"]) if "run_id" in kept else None
        if tags is None:
            tags = self._find_or_create(config)
        self._id = str(self._kept["run_id"])
        self.last_step = int(tags.get(LAST_STEP_TAG, 0))

    def steps(self, points: Sequence[Point]) -> None:
        """Log each step, with its tokens."""
        for point in points:
            time_ms = int(point.time_unix_s * 1000)
            values = {**point.values, **({"tokens": float(point.tokens)} if point.tokens else {})}
            self._log([(f"{TRAIN}{name}", values[name], time_ms, point.step) for name in values if name != _LEFT_OUT])
            self.last_step = point.step

    def rewind(self, step: int, tokens: int) -> bool:
        """Remove the metrics of superseded steps from an SQLite database; a server keeps them."""
        self.flush()
        if self._database:
            remove(self._database, self._id, step=step)
        # After the rows, so that they are removed again if this process is killed in between.
        self._client.set_tag(self._id, LAST_STEP_TAG, str(step))
        self.last_step = step
        return False

    def scores(self, scores: Scores) -> None:
        """Log scores with the milestone's tokens, and the scores of guessing as tags."""
        time_ms = int(scores.time_unix_s * 1000)
        for task, value in [*scores.values.items(), ("tokens", float(scores.tokens))]:
            self._log([(f"{scores.group}/{task}", value, time_ms, scores.step)])
        self._tag({f"chance.{task}": f"{value:.6g}" for task, value in scores.chances.items()})

    def labels(self, labels: Labels) -> None:
        """Set name, tags and description. A person may have set others in MLflow, which stay."""
        tags = {**labels.tags, **{_FACTS[name]: value for name, value in labels.facts.items()}}
        tags |= {f"hlatctl.amended.{key}": course[-_TAG_CHARS:] for key, course in labels.amended.items()}
        if labels.notes:
            tags[_DESCRIPTION] = "\n\n".join(labels.notes)
        if labels.name != self._kept.get("name"):
            tags[_NAME] = self._kept["name"] = labels.name
        for key, value in tags.items():
            self._client.set_tag(self._id, key, value)
        if labels.removed:
            known = mlflow_client.tags_of(self._client, self._id) or {}
            for key in set(labels.removed) & set(known):
                self._client.delete_tag(self._id, key)

    def outcome(self, outcome: Outcome) -> None:
        """Set the status, and at the end the numbers of the report, which was written before."""
        from mlflow.entities import Metric

        self._client.set_tag(self._id, "hlatctl.outcome", outcome.status)
        if outcome.status == "running":
            self._client.update_run(self._id, status="RUNNING")
            return
        end_unix_s = outcome.time_unix_s
        if self._about.simulated:
            self._client.set_tag(
                self._id, "hlatctl.simulated_duration", duration(end_unix_s - self._about.created_unix_s)
            )
            end_unix_s = (self._run.journal / f"{FLOW_WRITER}.jsonl").stat().st_mtime
        end_ms = int(end_unix_s * 1000)
        numbers = [Metric(name, value, end_ms, outcome.step) for name, value in end_metrics(self._run).items()]
        self._client.log_batch(self._id, metrics=numbers)
        self._client.set_terminated(self._id, status=_STATUS.get(outcome.status, "FAILED"), end_time=end_ms)

    def further(self, event: Event) -> None:
        """Log what a checkpoint cost, the corpus when it is prepared, and which stage of training begins."""
        if event["kind"] == "checkpoint_written":
            time_ms = int((event["time_unix_s"] + self._about.shift_s) * 1000)
            known = [name for name in ("wall_s", "stall_s", "bytes") if event.get(name) is not None]
            self._log([(f"checkpoint/{name}", float(event[name]), time_ms, int(event["step"])) for name in known])
        elif event["kind"] == "training_stage_started":
            time_ms = int((event["time_unix_s"] + self._about.shift_s) * 1000)
            self._log([("train/stage", float(event["number"]), time_ms, int(event["step"]))])
            self._client.set_tag(self._id, "hlatctl.training_stage", event["name"])
        elif event["kind"] == "stage_finished" and event.get("stage") == "data":
            self._client.log_inputs(self._id, datasets(self._run))

    def file(self, path: Path, name: str) -> None:
        """Upload a file as an artifact, and with results the table of their items."""
        if path in (self._run.config, self._run.provenance):
            # Both repeat the command line, which may contain an address with a password.
            self._client.log_text(self._id, hide(path.read_text("utf-8")), name)
        else:
            folder = Path(name).parent.as_posix()
            self._client.log_artifact(self._id, str(path), None if folder == "." else folder)
        if path.name == "results.json":
            self._log_items(path.parent)

    def flush(self) -> dict[str, Any]:
        """Send the metrics that wait; return the ids of the run and of its experiment."""
        from mlflow.entities import RunTag

        if self._rows:
            rows, self._rows = self._rows, []
            self._client.log_batch(self._id, metrics=rows, tags=[RunTag(LAST_STEP_TAG, str(self.last_step))])
        return self._kept

    def close(self) -> None:
        """Do nothing: MLflow has accepted everything."""

    def _log(self, rows: Sequence[MetricRow]) -> None:
        """Add the rows of one event, which are in one batch."""
        from mlflow.entities import Metric

        if len(self._rows) + len(rows) > _MAX_METRICS_PER_BATCH:
            self.flush()
        self._rows += [Metric(*row) for row in rows]

    def _tag(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        if tags:
            self._client.log_batch(self._id, tags=[RunTag(*tag) for tag in tags.items()])

    def _find_or_create(self, config: Config) -> Mapping[str, str]:
        about, client = self._about, self._client
        experiment_id = self._experiment_id(marked(config.tracking.experiment, simulated=about.simulated))
        identity = {_RUN_ID_TAG: about.run_id, _CREATED_TAG: repr(about.journal_created_unix_s)}
        known = mlflow_client.find_run(client, experiment_id, identity)
        self.is_new = known is None
        if known is None:
            tags = identity | {"hlatctl.simulated": str(about.simulated).lower()} | self._trial_tags(experiment_id)
            if config.fork.run is not None:
                tags |= {"hlatctl.parent": config.fork.run, "hlatctl.parent_step": str(config.fork.step)}
            name = marked(about.run_id, simulated=about.simulated)
            known = client.create_run(experiment_id, int(about.created_unix_s * 1000), tags, name)
        run_id = str(known.info.run_id)
        self._kept = {"run_id": run_id, "experiment_id": str(experiment_id), "name": known.info.run_name}
        mlflow_client.log_params(client, run_id, about.config)
        return known.data.tags

    def _experiment_id(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment:
            return str(experiment.experiment_id)
        # A server decides itself where it keeps artifacts.
        location = mlflow_artifacts(self._run.root.parent.absolute()).as_uri() if self._database else None
        return self._client.create_experiment(name, location)

    def _trial_tags(self, experiment_id: str) -> dict[str, str]:
        """Return the tags that make a trial a child of its sweep's run."""
        if not self._about.sweep:
            return {}
        sweep = SweepPaths(self._run.root.parent / self._about.sweep)
        tags = {_SWEEP_TAG: sweep.run_id, "hlatctl.trial": str(self._about.trial)}
        if sweep.space.is_file():  # otherwise the trial was copied to another runs folder
            tags["mlflow.parentRunId"] = _sweeps_run_id(self._client, experiment_id, sweep)
        return tags

    def _log_items(self, folder: Path) -> None:
        """Add the table of a folder of results, ``tokens-N`` or ``tokens-N/contract-M``, or replace an earlier one."""
        milestone, _, number = folder.relative_to(self._run.evals).as_posix().partition("/")
        tokens = int(milestone.removeprefix("tokens-"))
        contract = number.removeprefix("contract-")
        rows = table(self._run, MilestoneState(milestone_tokens=tokens, step=0, contract=contract))
        if not rows:
            return
        name = "-".join(filter(None, ["tokens", str(tokens), contract_record.folder(contract)]))
        path = f"items/{name}.json"
        content = json.dumps({"columns": COLUMNS, "data": rows}, ensure_ascii=False)
        self._client.log_text(self._id, hide(content), path)
        entry = {"path": path, "type": "table"}
        known = json.loads((mlflow_client.tags_of(self._client, self._id) or {}).get(_TABLES_TAG, "[]"))
        if entry not in known:
            self._client.set_tag(self._id, _TABLES_TAG, json.dumps([*known, entry][-_TABLES:]))


_TIMEOUT_S = 30.0
_COLUMNS = "key, value, timestamp, step, is_nan, run_uuid"
_SUPERSEDED = "run_uuid = :run AND key GLOB :keys AND step > :step"


def remove(database: Path, mlflow_run_id: str, *, step: int) -> None:
    """Remove the metrics of steps after this one; idempotent.

    Raises:
        sqlite3.Error: the database can't be written.
    """
    values = {"run": mlflow_run_id, "step": step, "keys": f"{TRAIN}*"}
    with closing(sqlite3.connect(database, timeout=_TIMEOUT_S)) as connection, connection:
        for statement in _statements():
            connection.execute(statement, values)


def _statements() -> Iterator[str]:
    yield f"DELETE FROM metrics WHERE {_SUPERSEDED}"
    yield f"DELETE FROM latest_metrics WHERE {_SUPERSEDED}"
    # With MAX, SQLite takes the other columns from the row of the maximum.
    yield (
        f"INSERT OR IGNORE INTO latest_metrics ({_COLUMNS}) SELECT key, value, timestamp, MAX(step), is_nan, run_uuid "
        "FROM metrics WHERE run_uuid = :run AND key GLOB :keys GROUP BY key"
    )


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


def end_metrics(run: RunPaths) -> dict[str, float]:
    """Return the numbers of a run's report; none if the report is missing or damaged."""
    try:
        numbers = json.loads((run.report / "numbers.json").read_text(encoding="utf-8"))
        found = {name: _at(numbers, place) for name, place in _END_METRICS.items()}
        found["run/restarts"] = max(0, len(numbers["attempts"]) - 1)
    except (OSError, *DAMAGED):
        return {}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def _at(record: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        record = record.get(key) if isinstance(record, dict) else None
    return record


#: MLflow's maximum.
_DIGEST_CHARS = 36


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


COLUMNS = ("task", "item", "metric", "value", "prompt", "choices", "answer", "target")
#: Rows of a task and of a table, and characters of a text: a table has at most 1.6 MB.
_TASK_ROWS, _ROWS, _CHARS = 5, 200, 2_000
_TABLES_TAG = "mlflow.loggedArtifacts"
#: MLflow's limit for a tag is 8,000 characters.
_TABLES = 80


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


_SWEEP_TAG, _SWEEP_CREATED_TAG = "hlatctl.sweep_id", "hlatctl.sweep_created_unix_s"
_POLL_S = 0.1


def copy_sweep(client: MlflowClient, sweep: SweepPaths, config: Config) -> None:
    """Copy a sweep's status, parameters and numbers to its run; nothing if no trial has been copied yet."""
    from mlflow.entities import Metric

    state = fold(read_events(sweep))
    experiment = client.get_experiment_by_name(marked(config.tracking.experiment, simulated=state.simulated))
    if experiment is None:
        return
    run_id = _sweeps_run_id(client, str(experiment.experiment_id), sweep)
    params = {"objective": state.objective, "direction": state.direction, "overrides": " ".join(state.overrides)}
    params |= {f"sweep.{name}": str(value) for name, value in state.settings.items()}
    known = client.get_run(run_id).data.params
    mlflow_client.log_params(client, run_id, {name: value for name, value in params.items() if name not in known})
    winner = best(state)
    numbers = {
        "trials": len(state.trials),
        "trials_finished": state.count("finished"),
        "process_hours": sum(trial.process_hours for trial in state.trials.values()),
        "saved_process_hours": sum(trial.saved_process_hours for trial in state.trials.values()),
        **({"best_objective": winner.mean} if winner and winner.mean is not None else {}),
    }
    now_ms = int(state.last_event_unix_s * 1000)
    client.log_batch(run_id, metrics=[Metric(name, float(value), now_ms, 0) for name, value in numbers.items()])
    if winner:
        client.set_tag(run_id, "hlatctl.best", winner.text)
    client.set_terminated(run_id, status=_STATUS.get(state.status, "RUNNING"), end_time=now_ms)


def _sweeps_run_id(client: MlflowClient, experiment_id: str, sweep: SweepPaths) -> str:
    """Return the id of the sweep's MLflow run, which is created if it doesn't exist. A lock prevents a second one."""
    state = fold(read_events(sweep))
    identity = {_SWEEP_TAG: state.sweep_id, _SWEEP_CREATED_TAG: repr(state.created_unix_s)}
    with hold(sweep.root / "mirror.lock", lambda _: time.sleep(_POLL_S)):
        run = mlflow_client.find_run(client, experiment_id, identity)
        if run is None:
            tags = identity | {"hlatctl.simulated": str(state.simulated).lower()}
            tags |= {_FACTS[fact]: value for fact, value in origin_of(sweep, ["hlatctl", "sweep"]).items()}
            name = marked(state.sweep_id, simulated=state.simulated)
            run = client.create_run(experiment_id, int(state.created_unix_s * 1000), tags, name)
        return str(run.info.run_id)
