"""Files that one process of each node reads for all: the copy, and what is read without one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hlatctl.run import node_copy
from hlatctl.run.scratch import JOB_FOLDER_ENV


def test_the_processes_of_a_job_read_a_shared_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job").mkdir()
    monkeypatch.setenv(JOB_FOLDER_ENV, os.fspath(tmp_path / "job"))
    shared = tmp_path / "config.yaml"
    shared.write_text("seed: 1\n")
    assert node_copy.read_text(shared) == "seed: 1\n"
    shared.unlink()
    assert node_copy.read_text(shared) == "seed: 1\n"


def test_a_process_without_a_job_and_one_that_cannot_copy_read_the_file_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "config.yaml"
    shared.write_text("seed: 1\n")
    monkeypatch.delenv(JOB_FOLDER_ENV, raising=False)
    assert node_copy.read_text(shared) == "seed: 1\n"
    (tmp_path / "job").write_text("not a folder")
    monkeypatch.setenv(JOB_FOLDER_ENV, os.fspath(tmp_path / "job"))
    assert node_copy.read_text(shared) == "seed: 1\n"


def test_a_missing_file_is_named_and_leaves_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job").mkdir()
    monkeypatch.setenv(JOB_FOLDER_ENV, os.fspath(tmp_path / "job"))
    with pytest.raises(FileNotFoundError) as error:
        node_copy.read_text(tmp_path / "config.yaml")
    assert error.value.filename == os.fspath(tmp_path / "config.yaml")
    assert not (tmp_path / "job" / "config.yaml").exists()
