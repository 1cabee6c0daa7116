"""The lines of the documents that begin with `hlatctl`, as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
_FENCED = re.compile(r"^```(?:bash|text)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4,}\S.*\n)+", re.MULTILINE)
_COMMAND = re.compile(r"^(?:.*\| )?(hlatctl .*)$")
_INLINE = re.compile(r"`(hlatctl [^`]*)`")
#: A file of a project's own folder of configuration, which a page shows whole.
_FILE = re.compile(r"`(conf/\S+)`:\n\n```yaml\n(.*?)```", re.DOTALL)


def pages() -> list[Path]:
    """Return all documents except the decisions, which describe the past."""
    own = [path for path in DOCS.rglob("*.md") if path.parent.name != "decisions"]
    return sorted([*own, REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"])


def typed_lines(page: Path) -> list[str]:
    """Return the command lines of a page's blocks of code, each once; continued lines are joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = [*_FENCED.findall(text), *_INDENTED.findall(_FENCED.sub("", text))]
    lines = [match[1] for block in blocks for line in block.splitlines() if (match := _COMMAND.match(line.strip()))]
    return list(dict.fromkeys(" ".join(line.split()) for line in lines))


def inline_commands(page: Path) -> list[str]:
    """Return the commands that a page's sentences name."""
    text = " ".join(page.read_text(encoding="utf-8").split())
    return list(dict.fromkeys(_INLINE.findall(text)))


def shown_files(page: Path) -> dict[str, str]:
    """Return the files of configuration that a page shows, by their path in a project's folder."""
    return dict(_FILE.findall(page.read_text(encoding="utf-8")))


def write_shown_files(folder: Path) -> None:
    """Write the files of configuration that pages show into a project's folder."""
    for page in pages():
        for name, text in shown_files(page).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    (folder / "conf" / "hlatctl.yaml").write_text("")
