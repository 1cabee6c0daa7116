"""What `config list`, `config keys` and `config show` print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from conf import folders
from conf.compose import compose, default_options, groups
from conf.load import decode
from hlatctl.cli.main import main
from hlatctl.run.errors import ConfigError

Cli = Callable[..., str]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("COLUMNS", "80")

    def call(*argv: str) -> str:
        code = main(["config", *argv])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return call


def test_list_shows_every_option_with_what_it_is_and_marks_those_that_are_used(cli: Cli) -> None:
    listed = json.loads(cli("list", "--json"))
    apart = {group: folders.names(group) for group in folders.APART}
    assert {group: list(options) for group, options in listed.items()} == groups() | apart
    assert [(g, o) for g, options in listed.items() for o, remark in options.items() if not remark] == []
    text = cli("list")
    assert max(map(len, text.splitlines())) <= 80
    for group, option in default_options().items():
        assert f"* {option} " in cli("list", group)


def test_keys_shows_default_rule_and_meaning(cli: Cli) -> None:
    assert cli("keys", "optimizer.max_grad_norm").splitlines() == [
        "optimizer.max_grad_norm=1.0  (number greater than 0)",
        "    Gradients are clipped to this global L2 norm.",
    ]
    (key,) = json.loads(cli("keys", "wsd_decay_fraction", "--json"))
    assert (key["name"], key["default"]) == ("optimizer.wsd_decay_fraction", 0.1)


def test_show_prints_what_overrides_result_in_and_what_they_change(cli: Cli) -> None:
    overrides = ("train.seq_len=256", "backend.compile=false")
    text = cli("show", *overrides)
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# train.seq_len: 256, not 512 (command line)",
        "# backend.compile: false, not true (command line)",
    ]
    assert decode(yaml.safe_load(text)) == compose(overrides)
    assert json.loads(cli("show", "seed=7", "--json"))["differs"] == {"seed": [1234, 7]}
    assert not cli("show").startswith("#")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("list", "cluste"), "error: cluste: no such group\nhint: did you mean cluster?"),
        (
            ("keys", "optimiser.lr"),
            "error: optimiser.lr: no key has this in its name\nhint: did you mean optimizer.lr?",
        ),
        (("show", "model=llama_8b"), "error: model=llama_8b: no such option\nhint: did you mean model=llama3_8b?"),
    ],
)
def test_what_does_not_exist_is_refused_with_the_nearest(
    argv: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *argv]) == ConfigError.exit_code
    assert capsys.readouterr().err.startswith(says)


def test_a_folder_of_the_user_is_listed_composed_and_named_as_the_origin(cli: Cli, tmp_path: Path) -> None:
    own = tmp_path / "experiment" / "mine.yaml"
    own.parent.mkdir()
    own.write_text("# @package _global_\n# Mine alone.\nseed: 7\n")
    listed = json.loads(cli("list", "experiment", "--json", "--config-dir", str(tmp_path)))
    assert listed["experiment"]["mine"] == f"Mine alone. [{tmp_path}]"
    shown = cli("show", "experiment=mine", "--config-dir", str(tmp_path))
    assert f"# seed: 7, not 1234 ({own})" in shown
    assert "mine" not in json.loads(cli("list", "experiment", "--json"))["experiment"]


def test_a_value_of_a_wrong_type_has_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "train.max_steps=abc"]) == ConfigError.exit_code
    assert "hint: `hlatctl config keys train.max_steps` says what it accepts" in capsys.readouterr().err


def test_a_folder_of_configuration_can_not_command_the_terminal(cli: Cli, tmp_path: Path) -> None:
    text = '# @package _global_\n# What \u202eit is.\ndata:\n  text_column: "a\\e]52;c;aGk=\\a\\u202e"\n'
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    for words in (["show", "experiment=mine"], ["list", "experiment"]):
        shown = cli(*words, "--config-dir", str(tmp_path))
        assert all(line.isprintable() for line in shown.split("\n"))
