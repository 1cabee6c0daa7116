"""The directory of a lost run, recreated from its remote folder."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("fsspec", reason="no extra for object storage is installed")

import conf.load
from conf.compose import compose
from flows import pretrain
from flows.stages import validate
from flows.tidy import recreate
from hlatctl.cache.remote import Copy
from hlatctl.cli.main import main
from hlatctl.run import files
from hlatctl.run.checkpoint import write_manifest
from hlatctl.run.errors import CheckpointError, ConfigError, LaunchError, RunExistsError, StorageError
from hlatctl.run.journal import read_events
from hlatctl.run.paths import RunPaths


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """The remote folder of a run ``lost``, moved to another bucket, with a checkpoint of 8."""
    folder = tmp_path / "bucket" / "lost"
    config = replace(compose(["checkpoint.remote_url=s3://old/runs"]), runs_dir="/nowhere")
    files.write_text(folder / "config.yaml", files.seal_lines(conf.load.dump(config)))
    copy = folder / "new"
    copy.mkdir()
    manifest = write_manifest(copy, step=8, tokens=8, world={"world_size": 1})
    copy.rename(folder / Copy.of(manifest).name)
    return folder


def test_the_configuration_returns_with_the_new_places(
    remote: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    assert main(["checkpoint", "restore", f"file://{remote}/", "--runs-dir", os.fspath(runs)]) == 0
    out, err = capsys.readouterr()
    assert out == f"hlatctl resume lost --runs-dir {runs}\n"
    assert "the newest checkpoint in the remote folder is of step 8" in err
    config = conf.load.load(runs / "lost" / "config.yaml")
    assert config == replace(compose([f"checkpoint.remote_url=file://{tmp_path}/bucket"]), runs_dir=os.fspath(runs))
    assert [event["kind"] for event in read_events(RunPaths(runs / "lost"))] == ["run_created"]
    with pytest.raises(RunExistsError):
        recreate(f"file://{remote}", runs, argv=[])


def test_nothing_is_created_from_what_is_no_remote_folder(remote: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(StorageError, match=r"has no config.yaml(.|\n)*hint: name the folder of one run"):
        recreate(f"file://{remote.parent}", runs, argv=[])
    with pytest.raises(ConfigError, match="must be 1 to 100 letters"):
        recreate("file:///", runs, argv=[])
    with pytest.raises(ConfigError, match=r"must be a run.s folder"):
        recreate(os.fspath(remote), runs, argv=[])
    (copy,) = remote.glob("step-*")
    (copy / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        recreate(f"file://{remote}", runs, argv=[])
    (remote / "config.yaml").write_text("a: 1")
    with pytest.raises(ConfigError):
        recreate(f"file://{remote}", runs, argv=[])
    assert not runs.exists()


@pytest.mark.processes
def test_a_run_whose_remote_folder_can_not_be_written_is_not_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(
        compose(["checkpoint.remote_url=file:///proc/no/bucket", "eval.enabled=false"]),
        runs_dir=os.fspath(tmp_path / "runs"),
    )
    monkeypatch.setattr(pretrain, "check_new", lambda config, begun: None)
    with pytest.raises(StorageError, match=r"checkpoint.remote_url=file:///proc/no/bucket: can't be used"):
        pretrain.create(config, argv=[])
    assert not (tmp_path / "runs").exists()

    def silent(*_: object, **__: object) -> str:
        raise LaunchError("no answer after 120 s")

    monkeypatch.setattr(validate, "ask", silent)
    with pytest.raises(StorageError, match="no answer after 120 s"):
        validate.check_remote(config, "new")
    validate.check_remote(compose(["cluster=simulated", "checkpoint.remote_url=file:///proc/no/bucket"]), "new")
