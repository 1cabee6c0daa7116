"""Provenance has commit, changes and command line, without secrets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hlatctl.run import provenance

pytestmark = pytest.mark.processes


def test_provenance_has_commit_and_changes_but_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "a-secret-value")
    record = provenance.collect(["hlatctl", "train"], tmp_path)
    assert record["argv"] == ["hlatctl", "train"]
    assert record["git"] is None
    assert "a-secret-value" not in json.dumps(record)


def test_provenance_masks_secrets_of_the_command_line_and_of_the_uncommitted_difference(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("one\n")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    (tmp_path / "file").write_text("one\nurl = 'https://me:hunter2@host/x'\n")
    record = provenance.collect(["hlatctl", "train", "tracking.mlflow_uri=http://me:hunter2@h"], tmp_path)
    assert record["argv"][-1] == "tracking.mlflow_uri=http://***@h"
    assert "+url = 'https://***@host/x'" in record["git"]["diff"]
    assert record["git"]["diff_masked"]
    assert "hunter2" not in json.dumps(record)
