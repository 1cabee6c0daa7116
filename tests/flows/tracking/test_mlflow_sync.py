"""The journal is copied to MLflow once, even if processes die. MLflow is real, on SQLite and over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf import load
from conf.of_run import of_run
from conf.schema import Config, TrackingConfig
from flows.tracking import mlflow_client, mlflow_register, mlflow_steps, mlflow_sweep, mlflow_sync
from flows.tracking import mlflow_run as copied
from flows.tracking.mlflow_client import ENABLE_ENV, SystemMetrics
from hlatctl.run import files, labels, runs
from hlatctl.run.errors import RunBusyError, StorageError
from hlatctl.run.journal import FLOW_WRITER, OPERATOR_WRITER, JournalWriter, eval_writer, train_writer
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
from tests.hlatctl.item_rows import row, write_items
from tests.ports import free_port
from tests.waiting import WAIT_S, wait_for

pytestmark = [
    pytest.mark.processes,
    # MLflow's own model of its tables, with the SQLAlchemy of today.
    pytest.mark.filterwarnings("ignore:The ..noload.. loader strategy is deprecated"),
]

Rows = list[tuple[str, int, float]]


_CPU = "system/cpu_utilization_percentage"


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, created by two processes simultaneously, as a new run and `hlatctl ui` may do."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    code = "import sys; from flows.tracking.mlflow_client import connect; connect(sys.argv[1]).search_experiments()"
    both = [subprocess.Popen([sys.executable, "-c", code, f"sqlite:///{path}"]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    return path


@pytest.fixture
def runs_dir(tmp_path: Path, empty_database: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    shutil.copy(empty_database, folder / "mlflow.db")
    return folder


def make_run(
    runs_dir: Path, run_id: str = "one", of: dict[str, Any] | None = None, *, simulated: bool = False, **tracking: Any
) -> RunPaths:
    config = Config(runs_dir=str(runs_dir), tracking=TrackingConfig(poll_s=0.2, **tracking))
    run = runs.create_run(runs_dir, run_id, load.dump(config))
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("run_created", run_id=run_id, simulated=simulated, **(of or {}))
        journal.append("head_started", pid=1, host="here")
    return run


def train(run: RunPaths, first: int, last: int, *, attempt: int = 1, add: float = 0.0) -> None:
    with JournalWriter(run, train_writer(0), attempt) as journal:
        journal.append("train_started", resumed_from_step=first - 1, tokens=(first - 1) * 100)
        for step in range(first, last + 1):
            journal.append("step", step=step, tokens=step * 100, loss=10.0 / step + add, grad_norm=1.0, lr=1e-3)


def finish(run: RunPaths, outcome: str = "finished") -> None:
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("run_finished", outcome=outcome, step=0, tokens=0, message="")


def rows(runs_dir: Path, key: str = "train/loss") -> Rows:
    """Return a metric's rows in MLflow's database, in order of steps."""
    with sqlite3.connect(runs_dir / "mlflow.db") as database:
        values: Rows = database.execute(
            "SELECT run_uuid, step, value FROM metrics WHERE key = ? ORDER BY step", (key,)
        ).fetchall()
    database.close()
    return values


def mlflow_run(runs_dir: Path, run: RunPaths) -> Any:
    client = mlflow_client.connect(mlflow_client.default_tracking_uri(runs_dir))
    return client.get_run(files.read_json(run.mirror)["mlflow_run_id"])


def steps(values: Rows) -> list[int]:
    return [step for _, step, _ in values]


def test_a_run_is_found_in_mlflow_with_its_parameters_metrics_tags_status_and_artifacts(runs_dir: Path) -> None:
    run = make_run(runs_dir)
    files.write_json(
        run.provenance, {"git": {"commit": "c0ffee"}, "python": "3.11.7 (main)", "host": {"name": "n1"}, "user": "ann"}
    )
    source = {"path": "/corpora/wiki/", "fingerprint": "f" * 64, "documents": 2, "rows": 2, "text_bytes": 9}
    files.write_sealed_json(run.dataset, {"sources": [source]})
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("stage_finished", stage="data", wall_s=1.0)
    train(run, 1, 3)
    with JournalWriter(run, train_writer(0), 1) as journal:
        journal.append("checkpoint_written", step=3, tokens=300, bytes=64, wall_s=2.0, stall_s=0.5, reason="final")
    scores = {"mmlu": {"metric": "acc", "value": 0.25}, "odd(name)": {"metric": "acc", "value": 0.5, "chance": 0.25}}
    with JournalWriter(run, eval_writer(300)) as journal:
        journal.append("eval_finished", milestone_tokens=300, step=3, scores=scores, skipped={}, wall_s=1.0)
    files.write_json(run.eval(300) / "results.json", {"v": 1})
    write_items(run, 300, "mmlu", [row("0", 1.0, task="mmlu", prompt="2 + 2 =", answer="4", target="4")])
    files.write_text(run.report / "index.html", "<p>report</p>")
    numbers = {"mfu_fraction": 0.4, "attempts": [{}, {}], "ledger": {"uptime_fraction": 0.9, "cost_usd": None}}
    files.write_text(run.report / "numbers.json", json.dumps(numbers))
    finish(run)

    assert mlflow_sync.sync(run) == 10

    copy = mlflow_run(runs_dir, run)
    assert (copy.info.run_name, copy.info.status) == ("one", "FINISHED")
    assert copy.data.params["optimizer.lr"] == "0.0003"
    assert copy.data.params["train.seq_len"] == "512"
    assert copy.data.tags["mlflow.source.git.commit"] == "c0ffee"
    assert copy.data.tags["hlatctl.python"] == "3.11.7"
    assert copy.data.tags["hlatctl.outcome"] == "finished"
    assert {key: copy.data.tags[key] for key in copy.data.tags if "chance" in key} == {"chance.odd_name_": "0.25"}
    assert steps(rows(runs_dir)) == [1, 2, 3]
    assert steps(rows(runs_dir, "by_tokens/train_loss")) == [100, 200, 300]
    assert [value for *_, value in rows(runs_dir, "eval/mmlu")] == [0.25]
    assert steps(rows(runs_dir, "by_tokens/eval_odd_name_")) == [300]
    assert [row[1:] for row in rows(runs_dir, "checkpoint/stall_s")] == [(3, 0.5)]
    table = "items/tokens-300.json"
    assert json.loads(copy.data.tags["mlflow.loggedArtifacts"]) == [{"path": table, "type": "table"}]
    content = json.loads(Path(copy.info.artifact_uri.removeprefix("file://"), table).read_text(encoding="utf-8"))
    assert content["data"] == [["mmlu", "0", "exact_match", 1.0, "2 + 2 =", "", "4", "4"]]
    ended = {name: value for name, value in copy.data.metrics.items() if name.startswith("run/")}
    assert ended == {"run/mfu": 0.4, "run/restarts": 1.0, "run/goodput": 0.9}
    (used,) = copy.inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest) == ("wiki", "f" * 36)
    stored = runs_dir / "mlartifacts" / copy.info.run_id / "artifacts"
    assert sorted(p.relative_to(stored).as_posix() for p in stored.rglob("*") if p.is_file()) == [
        "config.yaml",
        "evals/tokens-300/results.json",
        table,
        "provenance.json",
        "report/index.html",
        "report/numbers.json",
    ]


def test_only_new_events_are_copied(runs_dir: Path) -> None:
    run = make_run(runs_dir)
    train(run, 1, 5)
    assert mlflow_sync.sync(run) == 8
    assert mlflow_sync.sync(run) == 0
    train(run, 6, 7)
    assert mlflow_sync.sync(run) == 3
    assert steps(rows(runs_dir)) == [1, 2, 3, 4, 5, 6, 7]


def test_without_its_cursor_a_copy_finds_the_same_mlflow_run_and_makes_no_duplicates(runs_dir: Path) -> None:
    run = make_run(runs_dir)
    train(run, 1, 5)
    mlflow_sync.sync(run)
    before = rows(runs_dir)
    run.mirror.unlink()
    train(run, 6, 6)
    mlflow_sync.sync(run)
    assert rows(runs_dir)[:5] == before
    assert steps(rows(runs_dir)) == [1, 2, 3, 4, 5, 6]
    assert len({run_uuid for run_uuid, *_ in rows(runs_dir)}) == 1


@pytest.mark.parametrize("between", [True, False], ids=["in two copies", "in one copy"])
def test_repeated_steps_have_the_value_that_counts(runs_dir: Path, between: bool) -> None:
    run = make_run(runs_dir)
    train(run, 1, 6)
    if between:
        mlflow_sync.sync(run)
    train(run, 4, 5, attempt=2, add=100.0)
    mlflow_sync.sync(run)
    for key, unit in (("train/loss", 1), ("by_tokens/train_loss", 100)):
        values = rows(runs_dir, key)
        assert steps(values) == [unit * step for step in (1, 2, 3, 4, 5)]
        assert [value > 100 for *_, value in values] == [False] * 3 + [True] * 2
    assert mlflow_run(runs_dir, run).data.metrics["train/loss"] == pytest.approx(102.0), "the newest step that counts"
    run.mirror.unlink()
    mlflow_sync.sync(run)
    assert [value > 100 for *_, value in rows(runs_dir)] == [False] * 3 + [True] * 2


def test_superseded_steps_are_removed_before_new_ones_follow(runs_dir: Path) -> None:
    run = make_run(runs_dir)
    train(run, 1, 6)
    mlflow_sync.sync(run)
    train(run, 4, 3, attempt=2)  # it has started, without a step so far
    mlflow_sync.sync(run)
    assert steps(rows(runs_dir)) == [1, 2, 3]
    assert mlflow_run(runs_dir, run).data.metrics["train/loss"] == pytest.approx(10 / 3)
    with JournalWriter(run, "train-rank00001", 1) as journal:  # a late line of the previous attempt
        journal.append("step", step=7, tokens=700, loss=1.0)
    train(run, 4, 4, attempt=3)
    mlflow_sync.sync(run)
    assert steps(rows(runs_dir)) == [1, 2, 3, 4]


def test_labels_and_amendments_become_tags_once_and_parameters_stay(runs_dir: Path) -> None:
    run = make_run(runs_dir)
    labels.write_label(run, labels.change(name="first", tags=["model=small", "old"], note="begun"), by="ana")
    mlflow_sync.sync(run)
    with JournalWriter(run, OPERATOR_WRITER) as journal:
        changes = {"optimizer.lr": [0.0003, 0.0001]}
        journal.append("config_amended", number=1, changes=changes, by="ana", why="", at_step=None)
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("amendment_applied", number=1, step=40)
    labels.write_label(run, labels.change(untag=["old"], note="lower rate"), by="ben")
    for _ in range(2):
        mlflow_sync.sync(run)
        copied_run = mlflow_run(runs_dir, run)
        assert copied_run.info.run_name == "first"
        assert copied_run.data.params["optimizer.lr"] == "0.0003"
        tags = copied_run.data.tags
        assert tags["hlatctl.amended.optimizer.lr"] == "0.0003; from step 41: 0.0001"
        assert (tags["model"], "old" in tags) == ("small", False)
        assert [line.partition(", ")[2] for line in tags["mlflow.note.content"].split("\n\n")] == [
            "ana: begun",
            "ben: lower rate",
        ]


def test_a_long_journal_is_copied_in_parts_with_the_steps_that_count(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copied, "_EVENTS_AT_ONCE", 4)
    monkeypatch.setattr(mlflow_steps, "FIRST_STEPS", 10)
    monkeypatch.setattr("conf.tracking.MOST_STEPS", 40)  # of 611 planned: every 16th
    sent: list[int] = []
    real = copied.MirrorRun._log_metrics

    def spy(self: copied.MirrorRun, batch: list[Any]) -> None:
        sent.extend(metric.step for metric in batch if metric.key == "train/loss")
        real(self, batch)

    monkeypatch.setattr(copied.MirrorRun, "_log_metrics", spy)
    run = make_run(runs_dir)
    train(run, 1, 9)
    train(run, 6, 50, attempt=2, add=100.0)
    finish(run)
    mlflow_sync.sync(run)
    assert sent == [*range(1, 11), 16, 32, 48], "superseded steps are not sent, and late ones are thinned"
    assert [value > 100 for *_, value in rows(runs_dir)] == [False] * 5 + [True] * 8
    assert mlflow_run(runs_dir, run).info.status == "FINISHED"
    mlflow_sync.sync(run)
    assert steps(rows(runs_dir)) == sent


def test_a_copy_that_dies_at_any_batch_and_one_made_live_give_the_same_thinned_series(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copied, "_EVENTS_AT_ONCE", 40)
    monkeypatch.setattr(copied, "_MAX_METRICS_PER_BATCH", 50)
    monkeypatch.setattr(mlflow_steps, "FIRST_STEPS", 10)
    monkeypatch.setattr("conf.tracking.MOST_STEPS", 100)
    monkeypatch.setattr(Config, "total_steps", 400)
    live, whole = make_run(runs_dir, "live"), make_run(runs_dir, "whole")
    real, batches = copied.MirrorRun._log_metrics, [0]

    def die_sometimes(self: copied.MirrorRun, batch: list[Any]) -> None:
        real(self, batch)
        batches[0] += 1
        if batches[0] in (2, 7, 13):
            raise KeyboardInterrupt

    for first, last, attempt in ((1, 200, 1), (151, 301, 2), (302, 400, 2)):
        for run in (live, whole):
            train(run, first, last, attempt=attempt, add=attempt * 100.0)
        mlflow_sync.sync(live)
    monkeypatch.setattr(copied.MirrorRun, "_log_metrics", die_sometimes)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            mlflow_sync.sync(whole)
    mlflow_sync.sync(whole)
    series = {
        run.run_id: [row[1:] for row in rows(runs_dir) if row[0] == files.read_json(run.mirror)["mlflow_run_id"]]
        for run in (live, whole)
    }
    assert series["live"] == series["whole"]
    assert [step for step, _ in series["whole"]] == [*range(1, 11), *range(12, 401, 4)]
    assert [value > 200 for step, value in series["whole"]] == [step > 150 for step, _ in series["whole"]]


def test_the_client_of_mlflow_does_not_load_what_it_does_not_use(runs_dir: Path) -> None:
    code = (
        "import sys; from flows.tracking.mlflow_client import connect\n"
        "connect(sys.argv[1]).search_experiments()\n"
        "print([name for name in ('pandas', 'scipy', 'pyarrow') if name in sys.modules])"
    )
    argv = [sys.executable, "-c", code, mlflow_client.default_tracking_uri(runs_dir)]
    assert subprocess.run(argv, check=True, capture_output=True, text=True).stdout == "[]\n"


def test_on_a_server_the_later_value_of_a_step_is_added_and_is_the_latest(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copied, "remove", lambda database, run_id, to: None)  # as on a server
    run = make_run(runs_dir)
    train(run, 1, 6)
    mlflow_sync.sync(run)
    train(run, 4, 8, attempt=2, add=100.0)
    mlflow_sync.sync(run)
    values = rows(runs_dir)
    assert steps(values) == [1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 8]
    assert mlflow_run(runs_dir, run).data.metrics["train/loss"] > 100


def test_a_copier_that_dies_after_mlflow_committed_leaves_no_duplicates(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(runs_dir)
    train(run, 1, 1000)
    real = copied.MirrorRun._log_metrics
    batches: list[int] = []

    def die_after_the_second(self: copied.MirrorRun, batch: list[Any]) -> None:
        real(self, batch)
        batches.append(len(batch))
        if len(batches) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(copied.MirrorRun, "_log_metrics", die_after_the_second)
    with pytest.raises(KeyboardInterrupt):
        mlflow_sync.sync(run)
    monkeypatch.undo()
    assert 0 < len(rows(runs_dir)) < 1000
    assert all(size < 1000 for size in batches), "MLflow takes 1,000 metrics and tags a request"
    mlflow_sync.sync(run)
    assert steps(rows(runs_dir)) == list(range(1, 1001))


def test_a_batch_that_was_committed_before_its_tag_is_not_doubled(runs_dir: Path) -> None:
    run = make_run(runs_dir)
    train(run, 1, 20)
    mlflow_sync.sync(run)
    client = mlflow_client.connect(mlflow_client.default_tracking_uri(runs_dir))
    client.set_tag(files.read_json(run.mirror)["mlflow_run_id"], copied.LAST_STEP_TAG, "0")
    run.mirror.unlink()
    assert mlflow_sync.sync(run) == 23
    assert steps(rows(runs_dir)) == list(range(1, 21))


def test_losses_that_are_not_finite_are_copied(runs_dir: Path) -> None:
    run = make_run(runs_dir)
    with JournalWriter(run, train_writer(0), 1) as journal:
        journal.append("step", step=1, tokens=100, loss=float("nan"), grad_norm=float("inf"), lr=1e-3)
    mlflow_sync.sync(run)
    assert str(mlflow_run(runs_dir, run).data.metrics["train/loss"]) == "nan"


def test_a_resumed_run_is_running_again_and_gets_its_new_outcome(runs_dir: Path) -> None:
    run = make_run(runs_dir)
    finish(run, "stopped")
    mlflow_sync.sync(run)
    assert mlflow_run(runs_dir, run).info.status == "KILLED"
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("head_started", pid=1, host="here")
    mlflow_sync.sync(run)
    assert mlflow_run(runs_dir, run).info.status == "RUNNING"
    finish(run, "failed")
    mlflow_sync.sync(run)
    assert mlflow_run(runs_dir, run).info.status == "FAILED"


def test_a_run_that_someone_deleted_in_mlflow_is_copied_again(runs_dir: Path) -> None:
    run = make_run(runs_dir)
    train(run, 1, 3)
    mlflow_sync.sync(run)
    deleted = files.read_json(run.mirror)["mlflow_run_id"]
    mlflow_client.connect(mlflow_client.default_tracking_uri(runs_dir)).delete_run(deleted)
    mlflow_sync.sync(run)
    assert [run_uuid == deleted for run_uuid, *_ in rows(runs_dir)].count(False) == 3


def test_the_name_of_a_simulated_run_says_so(runs_dir: Path) -> None:
    run = make_run(runs_dir, simulated=True)
    mlflow_sync.sync(run)
    copy = mlflow_run(runs_dir, run)
    assert (copy.info.run_name, copy.data.tags["hlatctl.simulated"]) == ("one (SIMULATED)", "true")
    client = mlflow_client.connect(mlflow_client.default_tracking_uri(runs_dir))
    assert client.get_experiment(copy.info.experiment_id).name == "hlatctl (SIMULATED)"


def test_two_runs_of_the_same_name_in_two_folders_stay_apart(runs_dir: Path, tmp_path: Path) -> None:
    first = make_run(runs_dir)
    other = make_run(tmp_path / "other", mlflow_uri=mlflow_client.default_tracking_uri(runs_dir))
    for run in (first, other):
        train(run, 1, 2)
        mlflow_sync.sync(run)
    assert Counter(run_uuid for run_uuid, *_ in rows(runs_dir)) == {
        files.read_json(run.mirror)["mlflow_run_id"]: 2 for run in (first, other)
    }


def test_only_one_process_copies_a_run(runs_dir: Path) -> None:
    run = make_run(runs_dir)
    with mlflow_sync._only_copier(run), pytest.raises(RunBusyError, match="is copying it to MLflow"):
        mlflow_sync.sync(run)


def test_a_database_that_cannot_be_opened_is_named(runs_dir: Path) -> None:
    (runs_dir / "mlflow.db").write_text("this is no database, only some text that is long enough to be read")
    run = make_run(runs_dir)
    with pytest.raises(StorageError, match=r"tracking.mlflow_uri=sqlite:///.*mlflow.db: can't be opened"):
        mlflow_sync.sync(run)


def test_passwords_in_addresses_reach_neither_messages_nor_mlflow(runs_dir: Path, port: int) -> None:
    run = make_run(runs_dir, mlflow_uri=f"http://ann:secret@127.0.0.1:{port}")
    with pytest.raises(StorageError) as caught:
        mlflow_sync.sync(run)
    assert f"tracking.mlflow_uri=http://***@127.0.0.1:{port}" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "hlatctl sync" in caught.value.hint


def test_trials_are_children_of_their_sweeps_run_which_has_its_outcome(runs_dir: Path) -> None:
    sweep = runs.create_sweep(runs_dir, "rates", "overrides: []\n")
    trials = [make_run(runs_dir, sweep.trial(n).run_id, {"sweep": "rates", "trial": n}) for n in range(2)]
    with JournalWriter(sweep, FLOW_WRITER) as journal:
        journal.append(
            "sweep_created",
            sweep_id="rates",
            simulated=False,
            folder="/",
            overrides=["train.tokens=1M"],
            objective="loss",
            direction="min",
            accelerators=False,
            axes=[{"key": "optimizer.lr"}],
            settings={"pruner": "median"},
            arms=2,
            trials=2,
        )
        for n, run in enumerate(trials):
            journal.append(
                "trial_asked",
                trial=n,
                run_id=run.run_id,
                arm=n,
                point={"optimizer.lr": f"0.{n + 1}"},
                seed=None,
                overrides=[],
            )
            mlflow_sync.sync(run)
            journal.append(
                "trial_ended",
                trial=n,
                outcome="finished",
                why="",
                value=3.0 - n,
                tokens=100,
                process_hours=1.5,
                saved_process_hours=0.0,
            )
        journal.append("sweep_finished", outcome="finished", message="")
    for _ in range(2):
        mlflow_sweep.conclude(sweep, TrackingConfig())
    parents = {mlflow_run(runs_dir, run).data.tags["mlflow.parentRunId"] for run in trials}
    assert len(parents) == 1
    parent = mlflow_client.connect(mlflow_client.default_tracking_uri(runs_dir)).get_run(parents.pop())
    assert (parent.info.run_name, parent.info.status) == ("rates", "FINISHED")
    assert parent.data.metrics["best_objective"] == 2.0
    assert parent.data.metrics["process_hours"] == 3.0
    assert parent.data.params["sweep.pruner"] == "median"
    assert parent.data.tags["hlatctl.best"] == "optimizer.lr=0.2"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts processes that do not outlive the test."""
    started: list[subprocess.Popen[str]] = []

    def run_it(*argv: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, *argv], stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
            )
        )
        return started[-1]

    yield run_it
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


#: The MLflow server of `hlatctl ui`, with its password.
SERVE = """
import subprocess, sys, time
from pathlib import Path
from flows.tracking import local_server, ui, ui_record

runs_dir = Path(sys.argv[1])
with ui.bound("mlflow", int(sys.argv[2])) as listener, ui_record.only_ui(runs_dir):
    servers = ui.Servers(runs_dir, local_server.new_auth())
    servers.start([ui._mlflow(runs_dir, listener, servers.auth)])
    while True:
        servers.look()
        time.sleep(0.1)
"""


#: Follows a run, and is killed when MLflow has the first batch of metrics.
DIES_AFTER_A_BATCH = """
import os, sys
from mlflow import MlflowClient
from flows.tracking import mlflow_sync
real = MlflowClient.log_batch
def dies(self, *args, **values):
    real(self, *args, **values)
    if values.get("metrics"):
        os.kill(os.getpid(), 9)
MlflowClient.log_batch = dies
sys.exit(mlflow_sync.main(sys.argv[1:]))
"""


def test_a_follower_killed_between_batches_leaves_no_duplicates(
    runs_dir: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    run = make_run(runs_dir)
    train(run, 1, 4000)
    assert start("-c", DIES_AFTER_A_BATCH, str(run.root)).wait(WAIT_S) == -signal.SIGKILL
    assert not run.mirror.exists()
    assert 0 < len(rows(runs_dir)) < 4000
    mlflow_sync.sync(run)
    assert steps(rows(runs_dir)) == list(range(1, 4001))


def test_a_follower_copies_until_the_run_ends(runs_dir: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    run = make_run(runs_dir)
    with hold_driver(run):
        train(run, 1, 3)
        follower = start("-m", "flows.tracking.mlflow_sync", str(run.root))
        wait_for(lambda: steps(rows(runs_dir)) == [1, 2, 3])
        train(run, 4, 5)
        wait_for(lambda: steps(rows(runs_dir)) == [1, 2, 3, 4, 5])
        assert follower.poll() is None
        finish(run)
        assert follower.wait(WAIT_S) == 0
    assert mlflow_run(runs_dir, run).info.status == "FINISHED"


def test_a_follower_without_a_driver_copies_the_rest_and_ends(
    runs_dir: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    run = make_run(runs_dir)
    train(run, 1, 3)
    assert start("-m", "flows.tracking.mlflow_sync", str(run.root)).wait(WAIT_S) == 0
    assert steps(rows(runs_dir)) == [1, 2, 3]


def test_a_follower_without_a_driver_does_not_wait_for_mlflow(
    runs_dir: Path, port: int, start: Callable[..., subprocess.Popen[str]]
) -> None:
    run = make_run(runs_dir, mlflow_uri=f"http://127.0.0.1:{port}")
    follower = start("-m", "flows.tracking.mlflow_sync", str(run.root))
    _, error = follower.communicate(timeout=WAIT_S)
    assert follower.returncode == StorageError.exit_code
    assert error.splitlines()[-1] == "hint: the run continues without MLflow; `hlatctl sync` copies the rest later"


def test_what_a_server_missed_is_copied_when_it_answers_again(
    runs_dir: Path, port: int, start: Callable[..., subprocess.Popen[str]]
) -> None:
    run = make_run(runs_dir, mlflow_uri=f"http://127.0.0.1:{port}")
    with hold_driver(run):
        train(run, 1, 50)
        follower = start("-m", "flows.tracking.mlflow_sync", str(run.root))
        assert follower.stderr
        assert f"tracking.mlflow_uri=http://127.0.0.1:{port}" in follower.stderr.readline()
        start("-c", SERVE, str(runs_dir), str(port))
        train(run, 51, 60)
        finish(run)
        assert follower.wait(WAIT_S) == 0
    assert steps(rows(runs_dir)) == list(range(1, 61))
    assert follower.stderr.read().splitlines()[-1] == "MLflow is up to date again"


def test_mlflow_measures_the_machine_of_a_local_run_if_its_own_variable_asks_for_it(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psutil")
    said: list[str] = []
    run = make_run(runs_dir)
    mlflow_sync.sync(run)
    config = of_run(run)
    SystemMetrics(run, config, said.append).keep_measuring()
    monkeypatch.setenv(ENABLE_ENV, "true")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    elsewhere = replace(config, cluster=replace(config.cluster, launcher="slurm"))
    SystemMetrics(run, elsewhere, said.append).keep_measuring()
    assert rows(runs_dir, _CPU) == []
    here = SystemMetrics(run, config, said.append)
    here.keep_measuring()
    first = here._monitor
    wait_for(lambda: rows(runs_dir, _CPU))
    here.keep_measuring()
    assert here._monitor is first, "one at a time"
    here.end()
    known = len(rows(runs_dir, _CPU))
    here.keep_measuring()
    wait_for(lambda: len(rows(runs_dir, _CPU)) > known)
    here.end()
    assert steps(rows(runs_dir, _CPU)) == list(range(len(rows(runs_dir, _CPU)))), "it continues its numbers"
    assert said == []


def test_what_is_unknown_of_a_step_is_no_metric() -> None:
    event = {"time_unix_s": 1.0, "step": 5, "tokens_per_s": 2.0, "mfu": None, "peak_memory_bytes": 7, "memory_bytes": 6}
    assert [row[0] for row in copied.step_rows(event)] == ["train/tokens_per_s", "train/peak_memory_bytes"]


def test_scores_under_another_contract_are_separate_metrics() -> None:
    event = {
        "kind": "eval_finished",
        "time_unix_s": 1.0,
        "step": 5,
        "milestone_tokens": 10,
        "contract": "b" * 64,
        "scores": {"piqa": {"value": 0.5}},
    }
    assert [row[0] for row in copied.eval_rows(event, "b" * 64)] == ["eval/piqa", "by_tokens/eval_piqa"]
    assert [row[0] for row in copied.eval_rows(event, "a" * 64)] == [
        "eval_contract_bbbbbbbb/piqa",
        "by_tokens/eval_contract_bbbbbbbb_piqa",
    ]


def test_a_simulated_run_is_dated_when_it_was_simulated_and_says_how_long_it_would_take(runs_dir: Path) -> None:
    day_s, began_s = 86400.0, 1_700_000_000.0
    run = runs.create_run(runs_dir, "played", load.dump(Config(runs_dir=str(runs_dir))))
    os.utime(run.config, (began_s, began_s))
    now_s = [0.0]
    with JournalWriter(run, FLOW_WRITER, now_unix_s=lambda: now_s[0]) as journal:
        journal.append("run_created", run_id="played", simulated=True)
        journal.append("head_started", pid=1, host="here")
        now_s[0] = day_s
        with JournalWriter(run, train_writer(0), 1, now_unix_s=lambda: now_s[0]) as steps_journal:
            steps_journal.append("step", step=1, tokens=100, loss=2.0)
        mlflow_sync.sync(run)  # the shift is kept from one copy to the next
        now_s[0] = 3 * day_s
        journal.append("run_finished", outcome="finished", step=1, tokens=100, message="")
    os.utime(journal.path, (began_s + 9, began_s + 9))
    mlflow_sync.sync(run)
    copy = mlflow_run(runs_dir, run)
    assert (copy.info.start_time, copy.info.end_time) == (began_s * 1000, (began_s + 9) * 1000)
    assert copy.data.tags["hlatctl.simulated"] == "true"
    assert copy.data.tags["hlatctl.simulated_duration"] == "3 d 0 h"
    client = mlflow_client.connect(mlflow_client.default_tracking_uri(runs_dir))
    (metric,) = client.get_metric_history(copy.info.run_id, "train/loss")
    assert metric.timestamp == (began_s + day_s) * 1000


def test_an_exported_model_becomes_a_version_that_names_its_run(runs_dir: Path) -> None:
    run = make_run(runs_dir, register_model="tiny")
    written = {"step": 3, "dtype": "bfloat16", "parameters": 7}
    assert mlflow_register.register(run, runs_dir / "export", written) == "tiny version 1"
    assert mlflow_register.register(run, runs_dir / "later", written) == "tiny version 2"
    client = mlflow_client.connect(mlflow_client.default_tracking_uri(runs_dir))
    version = client.get_model_version("tiny", "2")
    assert version.run_id == mlflow_run(runs_dir, run).info.run_id
    assert (version.source, version.tags["hlatctl.step"]) == ((runs_dir / "later").as_uri(), "3")
