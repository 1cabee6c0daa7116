"""The format of the commands' help and usage errors: a subclass of typer's app for every group of commands.

``-h`` is ``--help``. Help names arguments and values by plain words (RUN, TEXT, N), whatever typer's version prints.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from hlatctl.cli.common import say

#: Types, as typer prints them, and the words for them.
_WORDS = {"str": "TEXT", "int": "N", "int range": "N", "float": "NUMBER", "float range": "NUMBER", "list[str]": "TEXT"}
_TYPE = re.compile(r" <([^>]+)>")
_BRACKETS = re.compile(r"^\{(.*)\}|^\[+(.*?)\]+(?=\.\.\.|$)")
_SUGGESTED = re.compile(r"\.? *(?:\(Possible options: |Did you mean:? )(?P<words>.*?)\??\)?$")
#: The base of all usage errors. Its module differs between typer's versions.
UsageError: Any = typer.BadParameter.__mro__[1]


class Command(TyperCommand):
    """A command whose help shows each argument and value as a word."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line: ``RUN``, ``[CACHE]``, ``[OVERRIDES]...``."""
        return [_BRACKETS.sub(_bare, piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options."""
        rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                rows[parameter.param_type_name].append((_plain(parameter.param_type_name, record[0]), record[1]))
        for title, listed in (("Arguments", rows["argument"]), ("Options", rows["option"])):
            if listed:
                with formatter.section(title):
                    formatter.write_dl(listed)


class Group(TyperGroup):
    """A group of commands. Prints help when no subcommand is given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words up to the command's name."""
        if not args and not ctx.resilient_parsing:
            say(ctx.get_help())
            raise typer.Exit(2)
        return super().parse_args(ctx, args)


class App(typer.Typer):
    """A group of commands with our help."""

    def __init__(self, about: str, *, cls: type[TyperGroup] = Group, **settings: Any) -> None:
        super().__init__(
            help=about,
            cls=cls,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Return a decorator that adds a command."""
        return super().command(name, cls=Command, **settings)


def usage_text(error: Any) -> str:
    """Return a usage error's message and hint."""
    message = error.format_message()
    suggested = _SUGGESTED.search(message)
    message = message[: suggested.start()] if suggested else message.rstrip(".")
    message = message[:1].lower() + message[1:].replace("Value error, ", "").replace("Input should be", "must be")
    if suggested:
        hint = f"did you mean {suggested['words'].replace(chr(39), '')}?"
    else:
        hint = f"`{' '.join(error.ctx.command_path.split())} --help` shows how to use it" if error.ctx else ""
    return f"{message}\nhint: {hint}" if hint else message


def _bare(match: re.Match[str]) -> str:
    return match[1] or f"[{match[2]}]"


def _plain(kind: str, name: str) -> str:
    """Return the first column of a line of help: an argument's metavar without a type, which would repeat it."""
    return _TYPE.sub("" if kind == "argument" else _word, name)


def _word(match: re.Match[str]) -> str:
    named = match[1]
    return f" {_WORDS.get(named) or (named if '|' in named else named.upper())}"
