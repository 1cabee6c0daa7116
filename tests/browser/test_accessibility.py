"""Every view and state of the page by the rules of axe-core: light and wide, dark and as narrow as a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
from tests.browser import lab, states

pytestmark = pytest.mark.processes
#: Views, and what is there when they are drawn.
VIEWS = (
    ("/runs?sim=1&open=*", "tr[data-run=beta2-t0001]"),
    ("/runs?q=nothing", ".summary + button"),
    ("/run/plain", ".plot[data-drawn]"),
    ("/run/failed?tab=history", ".phases"),
    ("/run/plain?tab=evaluation&task=mmlu&show=all", "article.item"),
    ("/run/plain?tab=samples", ".samples"),
    ("/run/plain?tab=logs", ".log"),
    ("/run/plain?tab=documents&step=3", "article.document"),
    ("/run/plain?tab=settings", "#panel details"),
    ("/compare?runs=plain,other&baselines=hlat", "table"),
    ("/compare", "main p.empty"),
    ("/sweep/beta2", ".plot[data-drawn]"),
    ("/run/failed", ".plot[data-drawn]"),
    ("/run/live", ".plot[data-drawn]"),
    ("/run/dry", ".plot[data-drawn]"),
    ("/run/new", "#panel p.empty"),
    ("/run/no-config", "p.says"),
    ("/run/damaged-journal", ".damage"),
    ("/run/nothing", ".problem"),
    ("/rums", "main a"),
)
#: Dialogs: the view, the button that opens one, and what is there when it is complete.
DIALOGS = (
    ("/runs", "Columns", "legend"),
    ("/runs", "Views", "form"),
    ("/run/live", "Stop", ".says p:not(.empty)"),
    ("/run/plain", "Amend", "textarea"),
    ("/run/plain", "Archive", ".says p:not(.empty)"),
    ("/run/plain", "Name, tags, note", "textarea"),
    ("/run/plain", "Alerts", "legend"),
    ("/run/plain", "Help and keys", "dl"),
)
#: Widths and colours. Both differ each time, because a rule of layout rarely depends on colours.
LOOKS = ((1440, "light"), (390, "dark"))
_RULES = "{resultTypes: ['violations'], rules: {'target-size': {enabled: true}}}"


@pytest.fixture(scope="module")
def axe() -> str:
    """The script of axe-core."""
    missing = "axe-core is not installed; `pip install -c constraints.txt axe-playwright-python` installs it"
    return str(pytest.importorskip("axe_playwright_python.base", reason=missing).AXE_SCRIPT)


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accessibility") / "runs"
    states.make_states(folder)
    return folder


@pytest.fixture(scope="module")
def server(axe: str, browser: Browser, runs_dir: Path) -> Iterator[lab.Server]:
    with hold_driver(RunPaths(runs_dir / "live")), lab.serving(runs_dir, "--allow-control") as started:
        yield started


def load(page: Page, address: str, axe: str) -> None:
    page.goto(address)
    page.evaluate(axe)  # by the debugger, so the page's policy allows it


def check(page: Page, state: str) -> list[str]:
    """Return the violations of a state of the page, each with its element."""
    found = []
    for width, colours in LOOKS:
        page.emulate_media(color_scheme=colours)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": 900})
        violations: list[Any] = page.evaluate(f"axe.run(document, {_RULES}).then((result) => result.violations)")
        found += [
            f"{state}, {colours}, {width} px: {node['html'][:200]}\n  {rule['id']}: {node['failureSummary']}"
            for rule in violations
            for node in rule["nodes"]
        ]
    return found


def test_no_view_and_no_dialog_breaks_a_rule_of_accessibility(
    axe: str, browser: Browser, server: lab.Server, runs_dir: Path, tmp_path: Path
) -> None:
    found = []
    with lab.opened(browser) as context:
        page = context.new_page()
        documents = [{"source": "books", "id": "a:1", "tokens": 12, "text": "once upon a time"}]
        page.route("**/documents?*", lambda route: route.fulfill(json={"step": 3, "documents": documents}))
        load(page, server.link, axe)
        for view, drawn in VIEWS:
            page.goto(f"{server.origin}/#{view}")
            page.locator(drawn).first.wait_for(state="attached")
            found += check(page, view)
        for view, button, complete in DIALOGS:
            page.goto(f"{server.origin}/#{view}")
            page.get_by_role("button", name=button, exact=True).click()
            page.locator(f"dialog[open] {complete}").first.wait_for()
            found += check(page, f"{view}, {button}")
            page.keyboard.press("Escape")
        page.goto(f"{server.origin}/#/run/new")
        expect(page.locator("h1")).to_have_text("new")
        shutil.rmtree(runs_dir / "new")
        page.locator("p.problem").wait_for()
        found += check(page, "a deleted run")
        page.goto(f"{server.origin}/#/compare?runs=plain,other")
        page.get_by_role("button", name="Share").click()
        with page.expect_download() as saved:
            page.get_by_role("button", name="Save as file").click()
        saved.value.save_as(tmp_path / "shared.html")
        page.get_by_role("button", name="Copy Markdown").click()
        page.get_by_label("Markdown").wait_for()
        found += check(page, "a message")
        page.keyboard.press("Escape")
        server.kill()
        expect(page.locator("#connection")).to_be_visible()
        found += check(page, "the server is away")
        load(page, (tmp_path / "shared.html").as_uri(), axe)
        page.locator("table").first.wait_for()
        found += check(page, "a shared file")
    assert not found, "\n".join(found)
