"""The shell's completion offers runs, and never an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hlatctl.cli.main import app


def offered(words: str, runs_dir: Path) -> list[str]:
    """What bash offers for the last word."""
    env = {"_HLATCTL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    result = CliRunner().invoke(app, [], prog_name="hlatctl", env={**env, "HLATCTL_RUNS_DIR": str(runs_dir)})
    assert result.stderr == ""
    return result.stdout.split()


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    for name, config in (("alpha", "config.yaml"), ("beta", "config.yaml"), ("swept", "sweep.yaml")):
        (tmp_path / name).mkdir()
        (tmp_path / name / config).write_text("{}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("hlatctl goodput ", {"latest", "alpha", "beta"}),
        ("hlatctl goodput al", {"alpha"}),
        ("hlatctl status sw", {"swept"}),
        ("hlatctl show sw", set()),
        ("hlatctl diff alpha be", {"beta"}),
        ("hlatctl compare alpha be", {"beta"}),
    ],
)
def test_runs_that_begin_with_the_word_are_offered(runs_dir: Path, words: str, names: set[str]) -> None:
    assert set(offered(words, runs_dir)) == names


def test_the_folder_that_the_line_names_counts(runs_dir: Path, tmp_path: Path) -> None:
    assert offered(f"hlatctl logs --runs-dir {runs_dir} al", tmp_path / "none") == ["alpha"]


def test_a_folder_that_is_missing_or_a_file_offers_nothing_but_latest(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "none", tmp_path / "file"):
        assert offered("hlatctl logs ", folder) == ["latest"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("hlatctl train exp", {"experiment=", "experiment_name="}),
        ("hlatctl train experiment=qu", {"experiment=quickstart"}),
        ("hlatctl train experiment = qu", {"quickstart"}),  # bash splits at "="
        ("hlatctl plan precision.name = bf", {"bf16", "bf16_sr"}),
        ("hlatctl train seed=3 optimizer.lr", {"optimizer.lr=", "optimizer.lr=0.0003"}),
        ("hlatctl sweep sweep = wei", {"weight_decay"}),
        ("hlatctl config show tracking.ena", {"tracking.enabled=", "tracking.enabled=true", "tracking.enabled=false"}),
        ("hlatctl train nothing.at.all", set()),
    ],
)
def test_overrides_are_completed(tmp_path: Path, words: str, expected: set[str]) -> None:
    assert set(offered(words, tmp_path)) == expected


def test_bash_offers_values_behind_the_equals_sign(tmp_path: Path) -> None:
    assert {"quickstart", "hlat_7b"} < set(offered("hlatctl train experiment =", tmp_path))


def test_options_of_the_users_folder_are_offered(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").touch()
    assert offered(f"hlatctl train --config-dir {tmp_path} model = mi", tmp_path) == ["mine"]
    assert offered("hlatctl train model = mi", tmp_path) == []


@pytest.mark.processes
def test_completion_imports_neither_hydra_nor_torch() -> None:
    code = (
        "import sys; from hlatctl.cli import main, completion; from types import SimpleNamespace as N;"
        "completion.override_words(N(params={}, info_name='train'), 'optimizer.l');"
        "print([name for name in ('hydra', 'omegaconf', 'torch', 'prefect') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
