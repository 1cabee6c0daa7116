"""One complete run, observed from outside: its files, the output of commands about it, and MLflow's content."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import conf.load
from conf.schema import SimulationConfig
from flows import pretrain
from flows.pretrain import PlainCaller
from hlatctl.run import continuations, contract, files
from hlatctl.run.checkpoint import checkpoint_steps, why_invalid
from hlatctl.run.errors import CompileError, load_error
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import node_name
from tests.e2e.conftest import Call, Cli

pytestmark = pytest.mark.processes

STEP_FIELDS = {"step", "tokens", "loss", "grad_norm", "param_norm", "lr", "step_s", "data_wait_s", "tokens_per_s"}


@pytest.fixture(scope="module")
def whole(cli: Cli, tracked: Cli) -> RunPaths:
    """A run with compilation (if there is a compiler), two milestones, Prefect and MLflow."""
    result = tracked.train(
        "whole",
        "eval.enabled=true",
        "eval.every_tokens=14000",
        "eval.limit=2",
        "eval.validation_tokens=2048",
        "tracking=mlflow",
        "tracking.poll_s=0.5",
        "backend.compile=true",
        "backend.coverage_gate=true",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "whole", "stdout is data: the run's id"
    return cli.paths("whole")


def test_every_step_is_journalled_once_with_every_field_and_the_loss_falls(cli: Cli, whole: RunPaths) -> None:
    steps = cli.events("whole", "step")
    assert [event["step"] for event in steps] == list(range(1, 41))
    assert all(event.keys() >= STEP_FIELDS for event in steps)
    assert [event["tokens"] for event in steps] == [512 * step for step in range(1, 41)]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5


def story(run: RunPaths) -> dict[str, list[Any]]:
    """Return each writer's events in order, without what depends on timing and on measured numbers."""
    events = read_events(run)
    flow = [
        (FLOW_KINDS[e["kind"]], e.get("stage")) for e in events if e["writer"] == "flow" and e["kind"] in FLOW_KINDS
    ]
    train = [e for e in events if e["writer"].startswith("train-")]
    checkpoints = {e["step"]: "" for e in train if e["kind"].startswith("checkpoint_")}
    for event in train:
        if event["kind"] in CHECKPOINT_KINDS and event["kind"] not in checkpoints[event["step"]]:
            checkpoints[event["step"]] += f"{event['kind']} "
    evals = [e for e in events if e["writer"].startswith("eval-") and e["kind"] != "eval_progress"]
    evaluations = [(e["milestone_tokens"], e["kind"]) for e in evals]
    return {
        "flow": flow,
        "milestones": [(e["milestone_tokens"], e["step"]) for e in events if e["kind"] == "milestone"],
        "training": [e["kind"] for e in train if e["kind"] in ("train_started", "compile_cache", "train_stopped")],
        "steps": [(e["step"], e["tokens"], e["lr"]) for e in train if e["kind"] == "step"],
        "checkpoints": sorted(checkpoints.items()),
        # Suites have several tasks; simulated evaluations have one.
        "evaluations": sorted(dict.fromkeys(evaluations), key=lambda pair: pair[0]),
    }


#: A stage that is skipped, because an earlier run in the folder prepared its result, counts as done.
FLOW_KINDS = {
    "run_created": "created",
    "head_started": "driven",
    "stage_finished": "done",
    "stage_skipped": "done",
    "stage_failed": "failed",
    "attempt_started": "started",
    "attempt_ended": "ended",
    "hang": "hang",
    "run_finished": "finished",
}
CHECKPOINT_KINDS = ("checkpoint_written", "checkpoint_committed", "checkpoint_verified", "checkpoint_rejected")


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed, so nothing is compiled")
def test_a_dry_run_journals_the_same_events_as_the_run_itself(whole: RunPaths, tmp_path: Path) -> None:
    config = conf.load.load(whole.config)
    simulated = replace(
        config,
        runs_dir=str(tmp_path),
        cluster=replace(config.cluster, launcher="simulated"),
        tracking=replace(config.tracking, enabled=False),
    )
    run = pretrain.create(simulated, argv=[], simulated=SimulationConfig(shows_recovery=False))
    pretrain.drive(run, caller_of=lambda ctx: PlainCaller(ctx.clock))
    real, simulated_story = story(whole), story(run)
    for part in real:
        assert simulated_story[part] == real[part], part


def test_checkpoints_are_complete_and_their_manifests_true(whole: RunPaths) -> None:
    steps = checkpoint_steps(whole)
    assert steps[-1] == 40
    assert [why_invalid(whole.checkpoint(step)) for step in steps] == [None] * len(steps)
    assert not list(whole.checkpoints.glob(".tmp*"))


def test_every_milestone_is_evaluated_by_the_harness_and_by_human_eval(whole: RunPaths) -> None:
    results = [files.read_json(path / "results.json") for path in whole.evals.glob("tokens-*")]
    assert sorted((r["milestone_tokens"], r["step"]) for r in results) == [(14000, 28), (20480, 40)]
    for result in results:
        names = set(result["scores"]) | set(result["skipped"])
        assert names >= {
            "validation_loss",
            "validation_perplexity",
            "validation_bits_per_byte",
            "smoke_mmlu",
            "smoke_bbh",
            "smoke_gsm8k",
            "smoke_crows_pairs",
        }
        assert any(name.startswith("smoke_humaneval") for name in names)
        versions = [contract.read_record(whole).fields(*one)["versions"] for one in result["contracts"].items()]
        assert {"torch", "lm_eval"} <= {name for recorded in versions for name in recorded}
    by_tokens = sorted(results, key=lambda r: int(r["milestone_tokens"]))
    losses = [r["scores"]["validation_loss"]["value"] for r in by_tokens]
    assert losses == sorted(losses, reverse=True), "it learns"
    texts = continuations.history(whole, [14000, 20480])
    assert [len(kept.continuations) for kept in texts] == [5, 5]


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed, so nothing is compiled")
def test_training_finds_every_graph_in_the_warm_cache(cli: Cli, whole: RunPaths) -> None:
    (cache,) = cli.events("whole", "compile_cache")
    assert cache["misses"] == 0
    assert cache["hits"] > 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed, so nothing is compiled")
def test_a_short_attempt_has_found_every_graph_and_left_nothing(whole: RunPaths) -> None:
    record = files.read_json(whole.coverage)
    assert (record["misses"], record["missing"], len(record["processes"])) == (0, [], 2)
    assert record["hits"] > 0
    assert not (whole.root / ".short-attempt").exists()


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed, so nothing is compiled")
def test_a_short_attempt_names_the_graph_that_a_cache_lacks(cli: Cli, whole: RunPaths, tmp_path: Path) -> None:
    """The job's script, which may be repeated by hand, with a copy of the cache and files of its own."""
    (cached,) = (cli.folder / "worker" / "compile").iterdir()
    cache = shutil.copytree(cached, tmp_path / "cache")
    graph = min((cache / "fxgraph").glob("*/*"))
    shutil.rmtree(graph)
    script, record = (whole.launch(0) / "coverage.sh").read_text(), whole.coverage.read_bytes()
    script = script.replace(os.fspath(cached), os.fspath(cache)).replace(os.fspath(whole.launch(0)), str(tmp_path))
    before = sorted(path for path in whole.root.rglob("*"))
    done = subprocess.run(["sh", "-c", script], env=cli.env, capture_output=True, text=True, check=False)
    whole.coverage.write_bytes(record)
    error = load_error(tmp_path / "coverage.error.json")
    assert isinstance(error, CompileError), done.stdout + done.stderr
    assert error.message == (
        "graphs that a short attempt needs and the cache lacks: 1, the first "
        f"{node_name()}: {graph.relative_to(cache).as_posix()}"
    )
    assert sorted(path for path in whole.root.rglob("*")) == before


def test_preflight_measured_every_worker(whole: RunPaths) -> None:
    record = files.read_json(whole.preflight)
    assert record["ok"] is True
    assert [worker["rank"] for worker in record["workers"]] == [0, 1]


def test_provenance_says_where_the_run_comes_from(whole: RunPaths) -> None:
    record = files.read_json(whole.provenance)
    assert "train" in record["argv"]
    assert record["packages"]["torch"].startswith("2.")
    dataset = files.read_json(whole.dataset)
    assert record["dataset_fingerprint"] == dataset["fingerprint"]
    assert record["tokenizer_fingerprint"] == dataset["tokenizer"]["fingerprint"]


def test_the_report_is_written(whole: RunPaths) -> None:
    page = (whole.report / "index.html").read_text(encoding="utf-8")
    assert "whole" in page
    assert "smoke_mmlu" in page


def test_status_runs_show_and_logs_agree(call: Call, whole: RunPaths) -> None:
    status = json.loads(call("status", "who", "--json").stdout)
    assert (status["run_id"], status["status"], status["step"], status["tokens"]) == ("whole", "finished", 40, 20480)
    listed = json.loads(call("runs", "--json").stdout)
    assert "whole" in [run["run_id"] for run in listed]
    shown = json.loads(call("show", "whole", "--json").stdout)
    assert shown["config"]["train"]["max_steps"] == 40
    logs = call("logs", "whole")
    assert logs.returncode == 0, logs.stderr


def test_diff_names_what_differs_and_nothing_else(call: Call, whole: RunPaths, undisturbed: str) -> None:
    result = call("diff", undisturbed, "whole")
    assert result.returncode == 0, result.stderr
    assert "backend.compile" in result.stdout
    assert "model.hidden_size" not in result.stdout


@pytest.mark.filterwarnings("ignore:The ..noload.. loader strategy is deprecated")  # MLflow's model of its tables
def test_mlflow_got_every_step_once(cli: Cli, whole: RunPaths) -> None:
    from mlflow.tracking import MlflowClient

    assert cli.run("sync", "whole").returncode == 0, "nothing new is fine too"
    client = MlflowClient(f"sqlite:///{cli.runs_dir / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("hlatctl")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], "tags.`hlatctl.run_id` = 'whole'")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == list(range(1, 41))
    assert run.info.status == "FINISHED"
    artifacts = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert {"config.yaml", "provenance.json"} <= artifacts


def test_a_dry_run_needs_no_corpus_prepared_and_says_that_it_is_simulated(cli: Cli, call: Call) -> None:
    result = call("train", "--dry-run", "--run-id", "dry", "tracking=none")
    assert result.returncode == 0, result.stderr
    assert "SIMULATED" in (cli.paths("dry").report / "index.html").read_text(encoding="utf-8").upper()
    assert json.loads(call("status", "dry", "--json").stdout)["simulated"] is True


def test_plan_changes_nothing(cli: Cli, call: Call, tmp_path: Path) -> None:
    result = call("plan", *cli.overrides, f"runs_dir={tmp_path / 'none'}")
    assert result.returncode == 0, result.stderr
    assert "trainer.launch 2" in result.stdout
    assert "compile" in result.stdout
    assert not (tmp_path / "none").exists()


def test_a_detached_run_is_followed_to_its_end(call: Call, undisturbed: str) -> None:
    assert json.loads(call("status", undisturbed, "--json").stdout)["status"] == "finished"


def test_resume_in_another_folder_finds_the_run(
    cli: Cli, whole: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run("resume", "whole").returncode == 0


def test_a_checkpoint_is_evaluated_with_other_settings_on_request_and_separately(
    tracked: Cli, call: Call, whole: RunPaths
) -> None:
    own = (whole.eval(20480) / "results.json").read_bytes()
    checkpoint = os.fspath(whole.checkpoint(40))
    result = tracked.run("eval", checkpoint, "eval.tasks=[smoke_crows_pairs]", "eval.limit=6", "--new-contract")
    assert result.returncode == 0, result.stderr
    path = Path(result.stdout.strip())
    assert (path.parent.parent, path.parent.name[:9]) == (whole.eval(20480), "contract-")
    record = files.read_json(path)
    assert {name: score["n"] for name, score in record["scores"].items()} == {"smoke_crows_pairs": 6}
    assert (whole.eval(20480) / "results.json").read_bytes() == own
    assert not list(whole.evals.rglob("model*")), "the exported model is deleted"
    status = call("status", "whole").stdout
    assert f"contract {record['contract'][:8]}  smoke_crows_pairs" in status
    assert "finished" in status


def test_items_in_the_corpus_are_looked_for_by_real_processes(cli: Cli, whole: RunPaths) -> None:
    result = cli.run("eval", "contamination", "whole", "--workers", "2", "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert (answer["complete"], answer["milestone_tokens"]) == (True, 20480)
    assert answer["tasks"]["smoke_mmlu"]["items"] > 4, "more than eval.limit has chosen"
    assert not any(task["overlapping"] for task in answer["tasks"].values()), "the corpus permutes 15 words"
    scored = files.read_json(whole.eval(20480) / "results.json")["scores"]["smoke_mmlu"]["value"]
    assert answer["means"]["smoke_mmlu"]["clean"]["value"] == pytest.approx(scored)
    (kept,) = whole.contamination(20480).glob("*/result.json")
    assert files.read_sealed_json(kept)["documents"] == answer["documents"]
    assert answer["unscanned"] == []
