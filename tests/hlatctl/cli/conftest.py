"""The folder of the runs that commands name, and commands of Slurm that do nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HLATCTL_RUNS_DIR", os.fspath(tmp_path / "runs"))
    return tmp_path / "runs"


_PARTITION = (
    "PartitionName=main Default=YES State=UP TotalNodes=4 MinNodes=0 MaxNodes=UNLIMITED MaxTime=2-00:00:00 Nodes=n[1-4]"
)


@dataclass(frozen=True)
class FakeSlurm:
    """Commands of a Slurm cluster in which job 7, a driver, waits."""

    folder: Path

    @property
    def cancelled(self) -> list[str]:
        """The words of each `scancel`."""
        path = self.folder / "cancelled"
        return path.read_text().splitlines() if path.exists() else []

    def forget(self) -> None:
        """Let job 7 be gone, as if somebody had cancelled it."""
        self._write("squeue", "true")

    def _write(self, name: str, line: str) -> None:
        new = self.folder / f"{name}.new"  # the one before may be running, and can't be written then
        new.write_text(f"#!/bin/sh\n{line}\n")
        new.chmod(0o755)
        new.replace(self.folder / name)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    folder = tmp_path / "bin"
    folder.mkdir()
    fake = FakeSlurm(folder)
    fake._write("squeue", "echo '7|PENDING|Dependency|t|||||x'")
    fake._write("scancel", f"echo $* >>{folder}/cancelled")
    fake._write("sbatch", "echo 7")
    fake._write("scontrol", f"case $* in *partition*) echo '{_PARTITION}' ;; esac")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return fake
