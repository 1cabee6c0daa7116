"""What the commands share: output, and shell completion of runs, which never fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hlatctl.cli.common import print_json, say, write
from hlatctl.cli.main import app


def test_json_has_no_character_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"größe": "plain", "name": "a\u202eb\x9b31m\x1b[2J\U000e0041\n"}
    print_json(value)
    printed = capsys.readouterr().out
    assert json.loads(printed) == value
    assert all(line.isprintable() for line in printed.split("\n"))
    assert "größe" in printed


def test_only_the_emphasis_of_tables_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for printed in (write, say):
        printed("\x1b]52;c;aGk=\x07\x1b]8;;http://h\x1b\\\x9b2J\u202e\r\x08a\tb\nc\u3000d")
    out, err = capsys.readouterr()
    assert out == err == "\\x1b]52;c;aGk=\\x07\\x1b]8;;http://h\\x1b\\\\x9b2J\\u202e\\r\\x08a\tb\nc\u3000d\n"


def test_bold_text_stays_bold_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(typer, "echo", lambda text, nl: shown.append(text))
    write("\x1b[1mbest\x1b[0m \x1b[8mhidden")
    assert shown == ["\x1b[1mbest\x1b[0m \\x1b[8mhidden"]


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
        "import sys; from hlatctl.cli import main, common; from types import SimpleNamespace as N;"
        "common.override_words(N(params={}, info_name='train'), 'optimizer.l');"
        "print([name for name in ('hydra', 'omegaconf', 'torch', 'prefect') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
