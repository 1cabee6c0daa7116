"""Where a run is in Prefect's and MLflow's pages."""

from __future__ import annotations

from pathlib import Path

from flows.tracking import links, mlflow_client
from flows.tracking.mirrors.copier import Cursor
from hlatctl.run import files
from hlatctl.run.paths import RunPaths


def copied_to(run: RunPaths, uri: str) -> None:
    Cursor(uri, kept={"experiment_id": "7", "run_id": "m1"}).write(run.mirror_cursor("mlflow"))


def test_a_run_is_linked_where_it_is_known_and_its_server_runs(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    assert (links.in_prefect(run, "http://p"), links.in_mlflow(run, "http://m")) == (None, None)
    links.keep_flow_run(run, "f1")
    own = mlflow_client.default_tracking_uri(tmp_path.parent)
    copied_to(run, own)
    assert links.in_prefect(run, "http://p") == "http://p/runs/flow-run/f1"
    assert links.in_mlflow(run, "http://m/#/experiments?workflowType=machine_learning") == links.in_mlflow(
        run, "http://m"
    )
    assert (
        links.in_mlflow(run, "http://m")
        == "http://m/#/experiments/7/runs/m1/model-metrics?workflowType=machine_learning"
    )
    assert (links.in_prefect(run, None), links.in_mlflow(run, None)) == (None, None)


def test_a_run_is_linked_at_the_mlflow_that_it_was_copied_to(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    page = "/#/experiments/7/runs/m1/model-metrics?workflowType=machine_learning"
    cases = {
        "https://mlflow.example/team/": f"https://mlflow.example/team{page}",
        "databricks": None,
        "sqlite:////elsewhere/mlflow.db": None,
    }
    for uri, address in cases.items():
        copied_to(run, uri)
        assert links.in_mlflow(run, "http://m/#/experiments") == address
    copied_to(run, "http://other")
    assert links.in_mlflow(run, None) == f"http://other{page}"


def test_a_damaged_file_is_no_link(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    run.prefect.write_text("{", encoding="utf-8")
    files.write_text(run.mirror_cursor("mlflow"), '["x"]')
    assert (links.in_prefect(run, "http://p"), links.in_mlflow(run, "http://m")) == (None, None)


def test_a_run_folder_that_cant_be_written_is_no_error(tmp_path: Path) -> None:
    links.keep_flow_run(RunPaths(tmp_path / "missing" / "file"), "f1")
