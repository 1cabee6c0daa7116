"""The site: no warning, nothing from other hosts, every command, key and decision, and a search without a server."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from playwright.sync_api import expect

from conf.reference import keys
from hlatctl.cli.main import app
from tests.browser import lab
from tests.docs.pages import DOCS, REPOSITORY

#: What a browser loads with a page: scripts, styles, pictures, fonts, frames.
_LOADED = re.compile(
    r"""<(?:script|img|iframe)[^>]*\ssrc=["'][^>]*>|<link[^>]*rel=["'](?:stylesheet|icon|preconnect|preload)["'][^>]*>"""
)
_ELSEWHERE = re.compile(r"""(?:src|href)=["'](?:https?:)?//|url\(["']?(?:https?:)?//|@import""")

pytestmark = pytest.mark.processes


def build(repository: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", os.fspath(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.fspath(REPOSITORY)}
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = build(REPOSITORY, folder)
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr
    return folder


def text_of(page: Path) -> str:
    """What a reader sees of a page."""
    return " ".join(html.unescape(re.sub(r"<wbr>|<[^>]*>", "", page.read_text(encoding="utf-8"))).split())


def test_a_link_to_nowhere_ends_the_build(tmp_path: Path) -> None:
    """Of a site of two pages, with the rules of the whole one."""
    (tmp_path / "docs").mkdir()
    shutil.copy(DOCS / "site.css", tmp_path / "docs")
    rules = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(rules.replace("hooks: [docs/hooks.py]", ""), encoding="utf-8")
    (tmp_path / "docs" / "concepts.md").write_text("# Concepts\n\n## Runs\n", encoding="utf-8")
    page = tmp_path / "docs" / "index.md"
    page.write_text("# Home\n\n[runs](concepts.md#runs)\n", encoding="utf-8")
    result = build(tmp_path, tmp_path / "site")
    assert result.returncode == 0, result.stderr
    page.write_text("# Home\n\n[nowhere](concepts.md#nowhere)\n", encoding="utf-8")
    result = build(tmp_path, tmp_path / "site")
    assert result.returncode != 0
    assert "concepts.md#nowhere" in result.stderr


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 80
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = [match[0] for match in _LOADED.finditer(text)]
        assert loaded, page
        assert not [tag for tag in loaded if _ELSEWHERE.search(tag)], page
    for style in site.rglob("*.css"):
        assert not _ELSEWHERE.search(style.read_text(encoding="utf-8")), style


def test_every_command_and_its_options_are_in_the_reference(site: Path) -> None:
    text = text_of(site / "reference" / "commands.html")
    root: Any = typer.main.get_command(app)
    for name, command in root.commands.items():
        assert f"hlatctl {name}" in text
        for below in getattr(command, "commands", {}):
            assert f"hlatctl {name} {below}" in text
    assert {f"--{option}" for option in ("dry-run", "search", "detach")} <= set(text.split())


def test_every_key_is_in_the_reference_with_its_meaning(site: Path) -> None:
    text = text_of(site / "reference" / "configuration.html")
    for key in keys():
        assert f"{key.name} {key.meaning.replace('`', '')}".replace(" ", "") in text.replace(" ", ""), key.name


def test_every_decision_is_listed(site: Path) -> None:
    text = (site / "decisions" / "index.html").read_text(encoding="utf-8")
    for path in (REPOSITORY / "docs" / "decisions").glob("[0-9]*.md"):
        assert f'href="{path.stem}.html"' in text


def test_a_page_that_is_opened_as_a_file_is_searched_and_pages_for_users_come_before_decisions(site: Path) -> None:
    if lab.CHROMIUM is None:
        pytest.skip("chromium is not installed; `apt-get install chromium` installs it")
    with lab.chromium() as browser:
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.goto((site / "start" / "first-run.html").as_uri())
        page.locator(".md-search__input").click()
        page.keyboard.type("checkpoint")
        first = page.locator(".md-search-result__item").first
        expect(first).to_contain_text("checkpoint", ignore_case=True, timeout=lab.WAIT_MS)
        assert "decisions/" not in (first.locator("a").first.get_attribute("href") or "")
