"""Every command line of the documents is one that `hlatctl` accepts, with keys and values that a run accepts."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer

from conf import folders, simulation
from conf.compose import compose, groups
from conf.reference import keys
from hlatctl.cli.main import app
from hlatctl.cli.remote import asked
from tests.docs.pages import inline_commands, pages, typed_lines, write_shown_files

#: Commands whose OVERRIDES make a configuration of their own; those of the others change a run's.
_COMPOSE = {
    "train",
    "plan",
    "forecast",
    "speedtest",
    "drill",
    "doctor",
    "inspect",
    "tokenize",
    "eval",
    "download",
    "needs",
    "pack",
}
#: A line with one of these is a part of a command line: its keys are checked, and not their composition.
_MORE = {"...", "…"}
#: What stands for a reader's own folders.
_OWN = (("$HOME", "/home/you"), ("$USER", "you"), ("/team/conf", "conf"), ("sha256:DIGEST", f"sha256:{'0' * 64}"))

LINES = list(dict.fromkeys(line for page in pages() for line in typed_lines(page)))
INLINE = list(dict.fromkeys(command for page in pages() for command in inline_commands(page)))


@functools.cache
def root() -> Any:
    return typer.main.get_command(app)


def named(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that words name, and the words that follow its name."""
    command = root()
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def parsed(words: list[str]) -> tuple[Any, Any]:
    """Return the command that words name and the context of its arguments. Nothing is run."""
    command, words = named(words)
    if getattr(command, "commands", {}) and words:  # `hlatctl eval TARGET` is a group with a command of its own
        assert command.name == "eval", f"no such command: {words[0]}"
    return command, command.make_context(command.name, words)


def words_of(line: str) -> list[str]:
    for written, own in _OWN:
        line = line.replace(written, own)
    words = shlex.split(line, comments=True)[1:]
    _, words = asked(words) or ("", words)
    return [word for word in words if word not in _MORE and not word.startswith("$")]


def accept(line: str) -> None:
    with suppress(typer.Exit):  # an option that prints and ends
        command, context = parsed(words_of(line))
        overrides = context.params.get("overrides") or []
        if command.name not in _COMPOSE or context.params.get("of") or _MORE & set(line.split()):
            check_keys(overrides)
        else:
            if context.params.get("dry_run") or command.name == "forecast":
                overrides, _ = simulation.split(overrides)
            composed(*overrides)


@functools.cache
def composed(*overrides: str) -> None:
    """Compose a configuration once; many lines have the same."""
    compose(overrides, to_start=False)


@functools.cache
def names() -> tuple[frozenset[str], frozenset[str]]:
    return frozenset((*groups(), *folders.APART)), frozenset(key.name for key in keys())


def check_keys(overrides: list[str]) -> None:
    known_groups, known_keys = names()
    for override in overrides:
        name = override.lstrip("+~").partition("=")[0]
        with_parents = {name.rsplit(".", count)[0] for count in range(name.count(".") + 1)}  # backend.env.NAME
        assert name in known_groups or with_parents & known_keys, f"{override}: no such key"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with the files of configuration that the pages show."""
    folder = tmp_path_factory.mktemp("project")
    write_shown_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("HLATCTL_RUNS_DIR", raising=False)
        yield folder


@pytest.mark.parametrize("line", LINES)
@pytest.mark.usefixtures("project")
def test_a_command_line_of_the_documents_is_accepted(line: str) -> None:
    accept(line)


@pytest.mark.parametrize("command", INLINE)
def test_a_command_in_a_sentence_exists_with_its_options(command: str) -> None:
    found, words = named(words_of(command))
    assert found.name != "hlatctl" or not words or words[0].startswith("--") or words[0] == "COMMAND", command
    options = {option for parameter in found.params for option in parameter.opts} | {"--help"}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("hlatctl nosuch RUN", "nosuch"),
        ("hlatctl data nosuch", "nosuch"),
        ("hlatctl status RUN --nosuch", "nosuch"),
        ("hlatctl train optimizer.nosuch=1", "nosuch"),
        ("hlatctl train model=nosuch", "nosuch"),
        ("hlatctl plan train.micro_batch_size=7", "micro_batch_size"),
        ("hlatctl amend RUN optimizer.nosuch=1", "nosuch"),
    ],
)
def test_a_command_line_that_hlatctl_refuses_is_found(line: str, named: str) -> None:
    with pytest.raises(Exception, match=named):
        accept(line)


def test_the_documents_have_the_lines_that_are_tested() -> None:
    assert len(LINES) > 150
    assert any("cluster=slurm_trn1" in line for line in LINES)
    assert any(line.startswith("hlatctl generate") for line in LINES)
