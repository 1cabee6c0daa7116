"""What only MLflow shows: parameters, datasets, artifacts, tables of items, sweeps, models, the machine's metrics.

MLflow is real, on SQLite and over HTTP. ``test_contract`` has what it has in common with other mirrors.
"""

from __future__ import annotations

import json
import os
import signal
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
from conf.schema import Config
from flows.tracking import mlflow_client
from flows.tracking.mirrors import mlflow_run, sync
from flows.tracking.mirrors.mlflow_run import COLUMNS, table
from flows.tracking.mlflow_client import ENABLE_ENV, SystemMetrics
from hlatctl.run import files, runs
from hlatctl.run.errors import StorageError
from hlatctl.run.journal import FLOW_WRITER, OPERATOR_WRITER, JournalWriter, eval_writer, train_writer
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import user_name
from hlatctl.run.state import MilestoneState
from tests.flows.tracking.mirrors.conftest import mlflow_copy, mlflow_rows
from tests.flows.tracking.mirrors.make import finish, label, losses, make_run, train
from tests.hlatctl.item_rows import row, write_items
from tests.ports import free_port
from tests.waiting import WAIT_S, wait_for

pytestmark = [
    pytest.mark.processes,
    # MLflow's own model of its tables, with the SQLAlchemy of today.
    pytest.mark.filterwarnings("ignore:The ..noload.. loader strategy is deprecated"),
]

_CPU = "system/cpu_utilization_percentage"
MILESTONE = MilestoneState(milestone_tokens=100, step=1)


@pytest.fixture(autouse=True)
def in_the_runs_folder(with_mlflow: Path) -> None:
    """MLflow is empty."""


def copy(run: RunPaths) -> Any:
    """Copy a run; return it as MLflow has it."""
    sync.sync(run, "mlflow")
    return mlflow_copy(run)


def curve(run: RunPaths, key: str = "train/loss") -> list[tuple[int, float]]:
    return [(step, value) for _, step, value in mlflow_rows(run.root.parent, key)]


def client_of(run: RunPaths) -> Any:
    return mlflow_client.connect(mlflow_client.default_tracking_uri(run.root.parent))


def test_a_run_is_found_in_mlflow_with_its_parameters_metrics_tags_status_and_artifacts(run: RunPaths) -> None:
    label(run, name="first", tags=["model=small"], note="begun")
    files.write_json(
        run.provenance, {"git": {"commit": "c0ffee"}, "python": "3.11.7 (main)", "host": {"name": "n1"}, "user": "ann"}
    )
    source = {"path": "/corpora/wiki/", "fingerprint": "f" * 64, "documents": 2, "rows": 2, "text_bytes": 9}
    files.write_sealed_json(run.dataset, {"sources": [source]})
    with JournalWriter(run, FLOW_WRITER) as journal:
        journal.append("stage_finished", stage="data", wall_s=1.0)
    train(run, 1, 3, memory_bytes=6.0)
    with JournalWriter(run, train_writer(0), 1) as journal:
        journal.append("training_stage_started", name="pre", number=1, step=1)
        journal.append("training_stage_started", name="mid", number=2, step=3)
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

    with JournalWriter(run, OPERATOR_WRITER) as journal:
        changes = {"optimizer.lr": [0.0003, 0.0001]}
        journal.append("config_amended", number=1, changes=changes, by="ana", why="", at_step=None)

    seen = copy(run)
    assert (seen.info.run_name, seen.info.status) == ("first", "FINISHED")
    assert seen.data.params["optimizer.lr"] == "0.0003"
    assert seen.data.params["train.seq_len"] == "512"
    assert seen.data.tags["mlflow.source.git.commit"] == "c0ffee"
    assert (seen.data.tags["mlflow.source.name"], seen.data.tags["mlflow.source.type"]) == ("hlatctl", "LOCAL")
    assert seen.data.tags["mlflow.user"] == user_name()
    assert seen.data.tags["hlatctl.python"] == "3.11.7"
    assert seen.data.tags["hlatctl.outcome"] == "finished"
    assert seen.data.tags["hlatctl.training_stage"] == "mid"
    assert curve(run, "train/stage") == [(1, 1.0), (3, 2.0)]
    assert seen.data.tags["hlatctl.amended.optimizer.lr"] == "0.0003; pending: 0.0001"
    assert seen.data.tags["model"] == "small"
    assert seen.data.tags["mlflow.note.content"].endswith("me: begun")
    assert {key: seen.data.tags[key] for key in seen.data.tags if "chance" in key} == {"chance.odd_name_": "0.25"}
    assert curve(run) == losses(1, 3)
    assert curve(run, "train/tokens") == [(1, 100), (2, 200), (3, 300)]
    assert curve(run, "train/memory_bytes") == []
    assert curve(run, "eval/mmlu") == [(3, 0.25)]
    assert (curve(run, "eval/odd_name_"), curve(run, "eval/tokens")) == ([(3, 0.5)], [(3, 300)])
    assert {key.partition("/")[0] for key in seen.data.metrics} == {"train", "eval", "checkpoint", "run"}
    assert curve(run, "checkpoint/stall_s") == [(3, 0.5)]
    table = "items/tokens-300.json"
    assert json.loads(seen.data.tags["mlflow.loggedArtifacts"]) == [{"path": table, "type": "table"}]
    content = json.loads(Path(seen.info.artifact_uri.removeprefix("file://"), table).read_text(encoding="utf-8"))
    assert content["data"] == [["mmlu", "0", "exact_match", 1.0, "2 + 2 =", "", "4", "4"]]
    ended = {name: value for name, value in seen.data.metrics.items() if name.startswith("run/")}
    assert ended == {"run/mfu": 0.4, "run/restarts": 1.0, "run/goodput": 0.9}
    (used,) = seen.inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest) == ("wiki", "f" * 36)
    stored = run.root.parent / "mlartifacts" / seen.info.run_id / "artifacts"
    assert sorted(p.relative_to(stored).as_posix() for p in stored.rglob("*") if p.is_file()) == [
        "config.yaml",
        "evals/tokens-300/results.json",
        table,
        "provenance.json",
        "report/index.html",
        "report/numbers.json",
    ]


def test_the_numbers_of_a_new_report_and_a_changed_file_are_copied_without_new_events(run: RunPaths) -> None:
    finish(run)
    copy(run)
    files.write_text(run.report / "index.html", "<p>report</p>")
    uri = copy(run).info.artifact_uri.removeprefix("file://")
    assert Path(uri, "report/index.html").read_text(encoding="utf-8") == "<p>report</p>"
    files.write_text(run.report / "numbers.json", json.dumps({"mfu_fraction": 0.4, "attempts": []}))
    finish(run)
    assert copy(run).data.metrics["run/mfu"] == 0.4


def test_the_latest_value_is_that_of_the_newest_step_that_counts(run: RunPaths) -> None:
    train(run, 1, 6)
    copy(run)
    train(run, 4, 5, attempt=2, add=100)
    assert copy(run).data.metrics["train/loss"] == 100.625
    expected = [*losses(1, 3), *losses(4, 5, add=100)]
    assert curve(run, "train/tokens") == [(step, 100 * step) for step, _ in expected]


def test_on_a_server_the_later_value_of_a_step_is_added_and_is_the_latest(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_run, "remove", lambda *_, **__: None)  # as on a server
    train(run, 1, 6)
    copy(run)
    train(run, 4, 8, attempt=2, add=100)
    assert copy(run).data.metrics["train/loss"] == 101
    run.mirror_cursor("mlflow").unlink()
    copy(run)
    assert [step for step, _ in curve(run)] == [1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 8]


def test_a_batch_has_no_more_metrics_than_mlflow_takes_and_is_sent_again_without_duplicates(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    real, sizes = MlflowClient.log_batch, list[int]()

    def spy(self: Any, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        sizes.append(len(metrics) + len(tags))
        real(self, run_id, metrics, params, tags)

    monkeypatch.setattr(MlflowClient, "log_batch", spy)
    train(run, 1, 1000)
    copy(run)
    assert 900 < max(sizes) <= 1000
    client_of(run).set_tag(mlflow_client.copied_to(run)["run_id"], mlflow_run.LAST_STEP_TAG, "0")
    run.mirror_cursor("mlflow").unlink()
    assert sync.sync(run, "mlflow") == 1000 + 2
    assert curve(run) == losses(1, 1000)


def test_the_client_of_mlflow_does_not_load_what_it_does_not_use(runs_dir: Path) -> None:
    code = (
        "import sys; from flows.tracking.mlflow_client import connect\n"
        "connect(sys.argv[1]).search_experiments()\n"
        "print([name for name in ('pandas', 'scipy', 'pyarrow') if name in sys.modules])"
    )
    argv = [sys.executable, "-c", code, mlflow_client.default_tracking_uri(runs_dir)]
    assert subprocess.run(argv, check=True, capture_output=True, text=True).stdout == "[]\n"


def test_what_a_person_sets_in_mlflow_stays(run: RunPaths) -> None:
    copy(run)
    client, run_id = client_of(run), mlflow_client.copied_to(run)["run_id"]
    client.set_tag(run_id, "mlflow.runName", "theirs")
    client.set_tag(run_id, "team", "a")
    label(run, tags=["model=small"])
    tags = copy(run).data.tags
    assert (tags["mlflow.runName"], tags["team"], tags["model"]) == ("theirs", "a", "small")


def test_two_runs_of_the_same_name_in_two_folders_stay_apart(run: RunPaths, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", mlflow_uri=mlflow_client.default_tracking_uri(run.root.parent))
    for each in (run, other):
        train(each, 1, 2)
        sync.sync(each, "mlflow")
    ids = [mlflow_client.copied_to(each)["run_id"] for each in (run, other)]
    assert Counter(run_id for run_id, *_ in mlflow_rows(run.root.parent)) == dict.fromkeys(ids, 2)


def test_a_database_that_cannot_be_opened_is_named(run: RunPaths) -> None:
    (run.root.parent / "mlflow.db").write_text("this is no database, only some text that is long enough to be read")
    with pytest.raises(StorageError, match=r"tracking.mlflow_uri=sqlite:///.*mlflow.db: can't be opened"):
        copy(run)


def test_passwords_in_addresses_reach_neither_messages_nor_mlflow(runs_dir: Path) -> None:
    run = make_run(runs_dir, mlflow_uri=f"http://ann:secret@127.0.0.1:{free_port()}")
    with pytest.raises(StorageError) as caught:
        copy(run)
    assert "tracking.mlflow_uri=http://***@127.0.0.1:" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert caught.value.hint == "the run continues without MLflow; `hlatctl sync` copies the rest later"


def test_trials_are_children_of_their_sweeps_run_which_has_its_outcome(runs_dir: Path) -> None:
    sweep = runs.create_sweep(runs_dir, "rates", "overrides: []\n")
    trials = [make_run(runs_dir, sweep.trial(n).run_id, of={"sweep": "rates", "trial": n}) for n in range(2)]
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
            sync.sync(run, "mlflow")
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
        assert sync.main([os.fspath(sweep.root), "mlflow"]) == 0
    parents = {mlflow_copy(run).data.tags["mlflow.parentRunId"] for run in trials}
    assert len(parents) == 1
    parent = client_of(trials[0]).get_run(parents.pop())
    assert (parent.info.run_name, parent.info.status) == ("rates", "FINISHED")
    assert parent.data.metrics["best_objective"] == 2.0
    assert parent.data.metrics["process_hours"] == 3.0
    assert parent.data.params["sweep.pruner"] == "median"
    assert parent.data.tags["hlatctl.best"] == "optimizer.lr=0.2"


def test_an_exported_model_becomes_a_version_that_names_its_run(runs_dir: Path) -> None:
    run = make_run(runs_dir, register_model="tiny")
    written = {"step": 3, "dtype": "bfloat16", "parameters": 7}
    assert sync.register(run, runs_dir / "export", written) == ["MLflow as tiny version 1"]
    assert sync.register(run, runs_dir / "later", written) == ["MLflow as tiny version 2"]
    version = client_of(run).get_model_version("tiny", "2")
    assert version.run_id == mlflow_copy(run).info.run_id
    assert (version.source, version.tags["hlatctl.step"]) == ((runs_dir / "later").as_uri(), "3")


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
        sync.sync(run, "mlflow")  # the shift is kept from one copy to the next
        now_s[0] = 3 * day_s
        journal.append("run_finished", outcome="finished", step=1, tokens=100, message="")
    os.utime(journal.path, (began_s + 9, began_s + 9))
    seen = copy(run)
    assert (seen.info.start_time, seen.info.end_time) == (began_s * 1000, (began_s + 9) * 1000)
    assert seen.data.tags["hlatctl.simulated"] == "true"
    assert seen.data.tags["hlatctl.simulated_duration"] == "3 d 0 h"
    client = client_of(run)
    (metric,) = client.get_metric_history(seen.info.run_id, "train/loss")
    assert metric.timestamp == (began_s + day_s) * 1000
    assert client.get_experiment(seen.info.experiment_id).name == "hlatctl (SIMULATED)"


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


def test_what_a_server_missed_is_copied_when_it_answers_again(
    runs_dir: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    port = free_port()
    run = make_run(runs_dir, mlflow_uri=f"http://127.0.0.1:{port}")
    with hold_driver(run):
        train(run, 1, 50)
        follower = start("-m", "flows.tracking.mirrors.sync", str(run.root), "mlflow")
        assert follower.stderr
        assert f"tracking.mlflow_uri=http://127.0.0.1:{port}" in follower.stderr.readline()
        start("-c", SERVE, str(runs_dir), str(port))
        train(run, 51, 60, attempt=2)
        finish(run)
        assert follower.wait(WAIT_S) == 0
    assert curve(run) == losses(1, 60)
    assert follower.stderr.read().splitlines()[-1] == "MLflow is up to date again"


def test_mlflow_measures_the_machine_of_a_local_run_if_its_own_variable_asks_for_it(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psutil")
    said: list[str] = []
    copy(run)
    config = of_run(run)
    SystemMetrics(run, config, said.append).keep_measuring()
    monkeypatch.setenv(ENABLE_ENV, "true")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    elsewhere = replace(config, cluster=replace(config.cluster, launcher="slurm"))
    SystemMetrics(run, elsewhere, said.append).keep_measuring()
    assert curve(run, _CPU) == []
    here = SystemMetrics(run, config, said.append)
    here.keep_measuring()
    first = here._monitor
    wait_for(lambda: curve(run, _CPU))
    here.keep_measuring()
    assert here._monitor is first, "one at a time"
    here.end()
    known = len(curve(run, _CPU))
    here.keep_measuring()
    wait_for(lambda: len(curve(run, _CPU)) > known)
    here.end()
    assert [step for step, _ in curve(run, _CPU)] == list(range(len(curve(run, _CPU)))), "it continues its numbers"
    assert said == []


def test_a_table_has_the_first_items_of_each_task_with_the_ends_of_their_texts(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    ranked = {"choices": [" no", " yes"], "loglikelihoods": [-2.0, -1.0], "target": "1"}
    long = row("0", 1.0, prompt="x" * 9_000 + "2 + 2 =", answer="4" * 9_000)
    write_items(run, 100, "gsm8k", [long, *(row(str(n), 0.0, **ranked) for n in range(1, 9))])
    first, second, *rest = (dict(zip(COLUMNS, values, strict=True)) for values in table(run, MILESTONE))
    assert (len(first["prompt"]), first["prompt"][-7:], len(first["answer"])) == (2_000, "2 + 2 =", 2_000)
    assert second["choices"] == "  -2.000 no\n> -1.000 yes"
    assert [each["item"] for each in rest] == ["2", "3", "4"]


def test_many_tasks_have_fewer_items_each(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    for number in range(70):
        write_items(run, 100, f"task{number:03}", [row(str(n), 0.0) for n in range(4)])
    assert len(table(run, MILESTONE)) == 140


def test_no_scan_of_the_corpus_is_read_for_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read = RunPaths(tmp_path), list[Path]()
    monkeypatch.setattr("hlatctl.report.contamination.files.read_sealed_json", read.append)
    for task in ("gsm8k", "piqa"):
        write_items(run, 100, task, [row("0", 1.0)])
    (run.contamination(100) / "scan").mkdir(parents=True)
    (run.contamination(100) / "scan" / "result.json").touch()
    assert len(table(run, MILESTONE)) == 2
    assert read == []


def test_a_damaged_file_and_a_milestone_without_items_give_no_rows(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    assert table(run, MILESTONE) == []
    write_items(run, 100, "gsm8k", [row("0", 1.0)])
    (run.eval(100) / "items-broken.parquet").write_bytes(b"PAR1")
    assert [values[0] for values in table(run, MILESTONE)] == ["gsm8k"]
