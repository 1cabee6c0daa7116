from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.load import load
from conf.sizes import checkpoint_bytes, runs_dir_bytes
from hlatctl.plan.sections import sections
from hlatctl.run import files
from hlatctl.run.errors import PreflightError, load_error
from hlatctl.run.paths import RunPaths, step_name
from trainer import preflight
from trainer.checkpoint.trust import Tiers


@pytest.mark.processes
def test_workers_that_pass_are_recorded_with_their_measurements(
    tmp_path: Path, make_run: Callable[..., RunPaths], start: Callable[..., Any], finish: Callable[..., str]
) -> None:
    cluster = {"processes_per_node": 2, "worker_cache_dir": os.fspath(tmp_path / "cache")}
    limits = {"min_open_files": 1, "min_matmul_gflops_per_s": 0.001, "min_allreduce_mib_per_s": 0.001}
    run = make_run(tmp_path / "run", cluster=cluster, preflight=limits)
    finish(start("trainer.preflight", "--run-dir", os.fspath(run.root), processes=2))
    record = files.read_json(run.preflight)
    assert (record["v"], record["ok"]) == (1, True)
    assert [worker["rank"] for worker in record["workers"]] == [0, 1]
    for worker in record["workers"]:
        assert worker["failures"] == []
        assert worker["matmul_gflops_per_s"] > 0
        assert worker["allreduce_mib_per_s"] > 0


@pytest.mark.processes
def test_worker_that_fails_is_named_with_measurement_and_limit(
    tmp_path: Path,
    make_run: Callable[..., RunPaths],
    start: Callable[..., Any],
    finish: Callable[..., str],
    error_file: Path,
) -> None:
    cluster = {"worker_cache_dir": os.fspath(tmp_path / "cache")}
    run = make_run(tmp_path / "run", cluster=cluster, preflight={"min_matmul_gflops_per_s": 1e9})
    finish(start("trainer.preflight", "--run-dir", os.fspath(run.root)), PreflightError.exit_code)
    error = load_error(error_file)
    assert isinstance(error, PreflightError)
    assert "(rank 0): matmul_gflops_per_s=" in error.message
    assert "below preflight.min_matmul_gflops_per_s=1e+09" in error.message
    assert json.loads(run.preflight.read_text())["ok"] is False


def test_folder_that_can_not_be_written_is_a_failure(
    tmp_path: Path, make_run: Callable[..., RunPaths], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    run = make_run(tmp_path / "run", cluster={"worker_cache_dir": os.fspath(tmp_path / "file" / "cache")})
    with pytest.raises(PreflightError, match=r"cluster\.worker_cache_dir .*: can't be written \(Not a directory\)"):
        preflight.main(["--run-dir", os.fspath(run.root)])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"checkpoint": {"keep": 3}, "eval": {"enabled": True, "every_tokens": 8 * 4 * 32}},
        {"checkpoint": {"keep": 1, "keep_every_tokens": 6 * 4 * 32}, "precision": {"name": "bf16_sr"}},
        {"checkpoint": {"keep_every_tokens": 600}, "eval": {"enabled": True, "every_tokens": 700}},
        {"parallel": {"pipeline_parallel_size": 2}, "cluster": {"processes_per_node": 2}},
    ],
)
def test_a_new_run_needs_the_disk_space_that_its_plan_shows(
    tmp_path: Path, make_config: Callable[..., Any], changes: dict[str, Any]
) -> None:
    config = make_config(**changes)
    demand = preflight.checkpoints_bytes(config, RunPaths(tmp_path / "run"))
    (section,) = [s for s in sections(config, compose) if s.title == "data, disk and tracking"]
    (figure,) = [figure for figure in section.figures if figure.name == "checkpoints on disk"]
    assert demand == figure.value == runs_dir_bytes(config)


def test_space_for_checkpoints_that_are_written_already_is_not_needed_again(
    tmp_path: Path, make_config: Callable[..., Any]
) -> None:
    config, run = make_config(checkpoint={"keep": 3}), RunPaths(tmp_path / "run")
    (run.checkpoint(8)).mkdir(parents=True)
    (run.checkpoint(8) / "manifest.json").write_text("{}")
    assert preflight.checkpoints_bytes(config, run) == 3 * checkpoint_bytes(config)


@pytest.mark.parametrize("existing", [0, 1])
def test_fast_folder_needs_room_for_two_checkpoints(
    tmp_path: Path, make_run: Callable[..., RunPaths], monkeypatch: pytest.MonkeyPatch, existing: int
) -> None:
    run = make_run(tmp_path / "run", checkpoint={"fast_dir": os.fspath(tmp_path / "nvme")})
    config = load(run.config)
    near = Tiers(config, run).folders[0]
    for step in range(1, existing + 1):
        (near / step_name(step)).mkdir(parents=True)
    usage, needed = shutil.disk_usage(tmp_path), (2 - existing) * checkpoint_bytes(config)

    def free(path: Path, value: int) -> Any:
        return usage._replace(free=value) if path in (tmp_path, near) else usage

    monkeypatch.setattr(shutil, "disk_usage", lambda path: free(path, needed - 1))
    shown = rf"checkpoint\.fast_dir=.*/nvme: {needed - 1} bytes are free, but its checkpoints need {needed} more"
    with pytest.raises(PreflightError, match=shown):
        preflight.main(["--run-dir", os.fspath(run.root)])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free(path, needed))
    assert not preflight._fast_dir_failures(config, run)


def test_a_remote_folder_must_be_writable_before_a_run_begins_and_not_after(
    tmp_path: Path, make_run: Callable[..., RunPaths]
) -> None:
    run = make_run(tmp_path / "run", checkpoint={"remote_url": "bogus://x"})
    config = load(run.config)
    (failure,) = preflight._remote_failures(config, run)
    assert failure.startswith("checkpoint.remote_url=bogus://x: ")
    (run.checkpoint(8)).mkdir(parents=True)
    (run.checkpoint(8) / "manifest.json").write_text("{}")
    assert preflight._remote_failures(config, run) == []


class TwoNodes:
    """The collectives of two nodes' first processes: this one, and another with what it says, one answer a call."""

    def __init__(self, rank: int, *others: dict[str, Any]) -> None:
        self.rank, self._others = rank, list(others)

    def gather(self, value: Any) -> list[Any]:
        other = self._others.pop(0)
        return [value, other] if self.rank == 0 else [other, value]


def compare(run: RunPaths, rank: int, *others: dict[str, Any]) -> list[str]:
    """Compare nodes in a job whose time is nearly over."""
    return preflight.compare_nodes(run, TwoNodes(rank, *others), timeout_s=0)[1]  # type: ignore[arg-type]


def test_the_node_that_does_not_share_the_run_directory_fails_and_the_first_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HLATCTL_NODE_NAME", "n1")
    run = RunPaths(tmp_path / "run")
    theirs = run.preflight_nodes / "n2.token"
    other = {"host": "n2", "path": os.fspath(theirs), "token": "theirs", "versions": preflight.versions()}
    missing = (
        f"run directory {run.root}: is not the same folder on n1 and n2: what n2 wrote there can't be read "
        "(No such file or directory); runs_dir must be on storage that all nodes share"
    )
    assert compare(run, 1, other, {}) == [missing]
    assert compare(run, 0, other, {}) == [], "the first node tells the other one"
    theirs.write_text("of another folder")
    assert "what n2 wrote there has another content" in compare(run, 1, other, {})[0]
    theirs.write_text("theirs")
    assert compare(run, 1, other, {"n1": "what n1 wrote there can't be read"}) == ["what n1 wrote there can't be read"]
    assert compare(run, 1, other, {}) == compare(run, 0, other, {}) == []
    assert [path.name for path in run.preflight_nodes.iterdir()] == [theirs.name], "its own token is removed"


@pytest.mark.parametrize(("driver_has", "failing"), [("0.1", "n2"), ("", "n1")])
def test_a_node_with_other_software_fails_and_the_driver_decides_a_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver_has: str, failing: str
) -> None:
    monkeypatch.setenv("HLATCTL_NODE_NAME", "n2")
    run = RunPaths(tmp_path / "run")
    theirs = run.preflight_nodes / "n1.token"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    usual = {**preflight.versions(), "torch": "0.1"}
    files.write_json(run.provenance, {"packages": {"torch": driver_has or preflight.versions()["torch"]}})
    other = {"host": "n1", "path": os.fspath(theirs), "token": "theirs", "versions": usual}
    failures = compare(run, 1, other, {})
    assert failures == ([f"torch {preflight.versions()['torch']}: 1 of 2 nodes have 0.1"] if failing == "n2" else [])
