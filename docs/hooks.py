"""Pages of the site that are generated from the code: commands, configuration, events, decisions.

MkDocs calls the functions that begin with ``on_`` (``hooks`` in ``mkdocs.yml``). Nothing here is written to ``docs/``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

    from conf.reference import Key
    from hlatctl.run.events import Kind

_DECISION = re.compile(r"# (.+)")
#: After a dot, a comma or an underscore (as an entity).
_BREAK = re.compile(r"(?<=[.,])(?=\w)|(?<=&#95;)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site's files."""
    from mkdocs.structure.files import File

    decisions = Path(config.docs_dir) / "decisions"
    pages = {
        "reference/commands.md": commands_page(),
        "reference/configuration.md": configuration_page(),
        "reference/events.md": events_page(),
        "decisions/index.md": decisions_page(decisions),
    }
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> None:
    """Show pages for users first in the results of a search."""
    if page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"boost": 0.3}


def commands_page() -> str:
    """Return the page of all commands, from the command line's own tree."""
    import typer

    from hlatctl.cli.main import app

    root: Any = typer.main.get_command(app)
    head = "# Commands\n\nGenerated from the command line. `hlatctl COMMAND --help` prints the same.\n"
    return "\n".join([head, *_command("hlatctl", root, 1)])


def _command(name: str, command: Any, level: int) -> Iterator[str]:
    """Yield the sections of a command and of those below it."""
    if level > 1:
        yield f"{'#' * level} {name}\n"
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"    {name} {usage}\n"
    yield _paragraphs(command.help)
    rows = [row for parameter in command.params if (row := _parameter(parameter, context))]
    yield _table(["argument or option", "meaning"], rows)
    for below in getattr(command, "commands", {}).values():
        yield from _command(f"{name} {below.name}", below, level + 1)


def _parameter(parameter: Any, context: Any) -> list[str] | None:
    """Return an argument's or option's name and meaning, as the help prints them. None if it is hidden."""
    if getattr(parameter, "hidden", False) or parameter.name in ("install_completion", "show_completion"):
        return None
    record = parameter.get_help_record(context)
    if record is None:
        return [_code(parameter.make_metavar(context)), ""]
    return [_code(record[0]), _cell(record[1])]


def configuration_page() -> str:
    """Return the page of all keys and options of the configuration, from the schema and its YAML files."""
    from conf.reference import keys

    parts = [
        "# Configuration keys",
        "Generated from the schema. `hlatctl config keys PATTERN` prints the same, and `hlatctl config show` prints",
        "what overrides result in. Defaults are the schema's; options and experiments set others. Names end with",
        "their unit. [Configuration](../configuration.md) explains how a configuration is composed.\n",
    ]
    for group, found in groupby(keys(), lambda key: key.name.partition(".")[0] if "." in key.name else "Run"):
        parts += [f"## {group}\n", _table(["key", "meaning"], [[_code(key.name), _meaning(key)] for key in found])]
    return "\n".join([*parts, "## Options\n", "`GROUP=OPTION` selects an option.\n", *_options()])


def _meaning(key: Key) -> str:
    from hlatctl.units import value_text

    default = "" if key.default is None else f" Default: {_code(value_text(key.default))}."
    return f"{_escaped(key.meaning)}<br>*{_escaped(key.accepts)}.*{default}"


def _options() -> Iterator[str]:
    from conf.compose import default_options, groups
    from hlatctl.cli.config import remark_of

    used = default_options()
    for group, options in groups().items():
        yield f"### {group}=\n"
        names = [_code(name) + " (default)" * (used.get(group) == name) for name in options]
        remarks = [_escaped(remark_of(group, name)) for name in options]
        yield _table(["option", "what it is"], zip(names, remarks, strict=True))


def events_page() -> str:
    """Return the page of all events of runs and sweeps, from their table."""
    from hlatctl.run.events import OF_RUNS, OF_SWEEPS

    parts = [
        "# Events",
        "Generated from `hlatctl/run/events.py`. [Events](../architecture.md#events) explains the fields that every",
        "event has, and which events are damaged. Any field can be null or missing, unless it is needed.\n",
    ]
    for title, kinds in (("Runs", OF_RUNS), ("Sweeps", OF_SWEEPS)):
        rows = [[_code(kind), _escaped(row.writers), _event(row)] for kind, row in kinds.items()]
        parts += [f"## {title}\n", _table(["kind", "writer", "meaning and fields"], rows)]
    return "\n".join(parts)


def _event(kind: Kind) -> str:
    from hlatctl.run.events import TYPES

    lines = [f"*{_escaped(kind.meaning)}*"] if kind.meaning else []
    for name, field in kind.fields.items():
        about = [
            TYPES[field.type][1],
            *(["needed"] if field.is_needed else []),
            *([field.remark] if field.remark else []),
        ]
        lines.append(f"{_code(name)}: {_escaped(', '.join(about))}")
    return "<br>".join(lines)


def decisions_page(folder: Path) -> str:
    """Return the list of the decisions in a folder."""
    lines = []
    for path in sorted(folder.glob("[0-9]*.md")):
        title = _DECISION.match(path.read_text(encoding="utf-8"))
        lines.append(f"- [{title[1] if title else path.stem}]({path.name})")
    return "\n".join(["# Decisions\n", "Choices that are hard to undo, and why they were made.\n", *lines, ""])


def _paragraphs(text: str | None) -> str:
    return _escaped(inspect.cleandoc(text or "").replace("\f", "")) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _code(text: str) -> str:
    """Return text as code that may break between the words of a name."""
    return f"<code>{_BREAK.sub('<wbr>', _plain(text))}</code>" if text else ""


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split()))


def _escaped(text: str) -> str:
    """Return text in which only code in backticks keeps its meaning for Markdown."""
    parts = re.split(r"`([^`]*)`", text)
    return "".join(_code(part) if number % 2 else _plain(part) for number, part in enumerate(parts))


def _plain(text: str) -> str:
    for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("*", "&#42;"), ("[", "&#91;")):
        text = text.replace(sign, entity)
    return text.replace("_", "&#95;")
