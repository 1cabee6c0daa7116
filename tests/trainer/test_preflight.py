from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hlatctl.run import files
from hlatctl.run.errors import PreflightError, load_error
from hlatctl.run.paths import RunPaths
from trainer import model as llama
from trainer import preflight


def test_fit_workers_are_written_down_with_their_measures(
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


def test_worker_that_falls_short_is_named_with_measure_and_threshold(
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


def test_room_is_asked_for_every_checkpoint_still_to_come(
    tmp_path: Path, make_config: Callable[..., Any], make_run: Callable[..., RunPaths]
) -> None:
    config = make_config(checkpoint={"keep": 3}, eval={"enabled": True, "every_tokens": 8 * 4 * 32})
    run = make_run(tmp_path / "run")
    one = 12 * llama.count_parameters(config.model)
    assert preflight.checkpoints_bytes(config, run) == one * (3 + 3 + 1)
    (run.checkpoint(8)).mkdir(parents=True)
    (run.checkpoint(8) / "manifest.json").write_text("{}")
    assert preflight.checkpoints_bytes(config, run) == one * 6
    permanent = make_config(checkpoint={"keep": 3, "keep_every_tokens": 6 * 4 * 32})
    assert preflight.checkpoints_bytes(permanent, run) == one * (3 + 4 + 1 - 1)


def test_fast_folder_needs_room_for_two_checkpoints(
    tmp_path: Path, make_run: Callable[..., RunPaths], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", checkpoint={"fast_dir": os.fspath(tmp_path / "nvme")})
    usage = shutil.disk_usage(tmp_path)
    few = usage._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: few if path == tmp_path else usage)
    with pytest.raises(
        PreflightError, match=r"checkpoint\.fast_dir=.*/nvme: 1000 bytes are free, two checkpoints take"
    ):
        preflight.main(["--run-dir", os.fspath(run.root)])
