"""The page while things change: a run that trains, and a server that goes away."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from conf.of_run import of_run
from hlatctl.run.journal import JournalWriter
from hlatctl.run.lease import hold_driver
from hlatctl.run.paths import RunPaths
from tests.browser import lab

pytestmark = pytest.mark.processes
#: The line of the loss in the first chart.
LOSS = "document.querySelector('.plot').chart.lines.find((line) => line.meta)"


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of its own: another module's server may still serve the shared one."""
    folder = tmp_path_factory.mktemp("live") / "runs"
    lab.make_runs(folder)
    return folder


@pytest.fixture(scope="module")
def live(runs_dir: Path) -> Iterator[RunPaths]:
    """A run that this process drives."""
    run = RunPaths(runs_dir / "live")
    with hold_driver(run):
        yield run


@pytest.fixture(scope="module")
def server(runs_dir: Path, browser: Browser, live: RunPaths) -> Iterator[lab.Server]:
    with lab.serving(runs_dir, "--allow-control") as started:
        yield started


def test_new_steps_reach_the_list_and_the_curves(page: Page, live: RunPaths) -> None:
    expect(page.locator('tr[data-run="live"]')).to_contain_text("running")
    lab.grow(live, 121, 130, loss=2.345)
    expect(page.locator('tr[data-run="live"]')).to_contain_text("2.345")
    page.locator('tr[data-run="live"] a').click()
    lab.until(page, "Boolean(document.querySelector('.plot[data-drawn]'))")
    assert page.evaluate(f"{LOSS}.x.at(-1)") == 130
    page.get_by_role("button", name="Stop").focus()
    lab.grow(live, 131, 140, loss=2.222)
    lab.until(page, f"{LOSS}.x.at(-1) === 140")
    expect(page.locator(".tiles")).to_contain_text("2.222")
    expect(page.get_by_role("button", name="Stop")).to_be_focused()


def test_a_note_appears_while_the_page_is_open(page: Page, live: RunPaths) -> None:
    lab.label(live, note="spike at noon")
    expect(page.locator('tr[data-run="live"]')).to_contain_text("spike at noon")


def test_the_page_says_that_it_is_old_and_recovers_after_the_server_returns(
    page: Page, server: lab.Server, live: RunPaths
) -> None:
    banner = page.locator("#connection")
    expect(banner).to_be_hidden()
    server.kill()
    expect(banner).to_contain_text("What is shown is from")
    expect(page.locator('tr[data-run="live"]')).to_be_visible()
    lab.grow(live, 141, 150, loss=2.111)
    server.start()
    expect(banner).to_be_hidden()
    expect(page.locator('tr[data-run="live"]')).to_contain_text("2.111")


def tab_to(page: Page, target: Locator, key: str = "Tab") -> None:
    """Go to a control by Tab alone. On the way, the focus is always on something that is outlined."""
    focused = "(() => { const e = document.activeElement; return [e.tagName, getComputedStyle(e).outlineStyle]; })()"
    for _ in range(40):
        if target.evaluate("(node) => node === document.activeElement"):
            return
        page.keyboard.press(key)
        tag, outline = page.evaluate(focused)
        assert tag == "BODY" or outline == "solid"  # the body: from the last control to the browser's own ones
    raise AssertionError(f"{target} is not reached")


def test_the_keyboard_alone_reads_curves_shares_compares_and_stops_a_run(page: Page, live: RunPaths) -> None:
    keys, button = page.keyboard, page.get_by_role("button", name="Stop", exact=True)
    keys.press("Tab")
    keys.press("Enter")  # the link that skips the head of the page
    expect(page.locator("main")).to_be_focused()
    keys.press("/")
    keys.type("live")
    keys.press("Escape")
    keys.press("ArrowDown")
    expect(page.locator('tr[data-run="live"] a')).to_be_focused()
    keys.press("Enter")
    expect(page.locator("main")).to_be_focused()
    lab.until(page, "Boolean(document.querySelector('.plot[data-drawn]'))")
    crosshair = page.get_by_role("slider", name="Crosshair")
    tab_to(page, crosshair)
    keys.press("Home")
    keys.press("+")
    page.wait_for_url("**zoom=1:*")
    keys.press("0")
    lab.until(page, "!location.hash.includes('zoom=')")
    keys.press("+")
    reset = page.get_by_role("button", name="Reset zoom")
    reset.wait_for()
    tab_to(page, reset, "Shift+Tab")
    keys.press("Enter")
    expect(crosshair).to_be_focused()
    tab_to(page, page.get_by_role("button", name="Pin Loss"))
    keys.press("Enter")
    expect(page.get_by_role("button", name="Unpin Loss")).to_be_focused()
    keys.press("Enter")
    tab_to(page, page.get_by_role("button", name="Share"), "Shift+Tab")
    keys.press("Enter")
    tab_to(page, page.get_by_role("button", name="Copy Markdown"))
    keys.press("Enter")
    expect(page.get_by_label("Markdown")).to_have_value(re.compile("^# live\n"))
    keys.press("Escape")
    expect(page.get_by_role("button", name="Share")).to_be_focused()
    tab_to(page, button)
    keys.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("writes a checkpoint and stops")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    keys.press("Escape")
    expect(button).to_be_focused()
    expect(page.locator(".chip").first).to_have_text("running")
    keys.press("Enter")
    expect(dialog).to_contain_text("writes a checkpoint and stops")
    tab_to(page, dialog.get_by_role("button", name="Stop"))
    keys.press("Enter")
    expect(page.locator(".chip").first).to_have_text("stopping")
    expect(dialog).to_have_count(0)
    expect(button).to_be_focused()  # although it was made again
    keys.press("g")
    keys.press("r")
    expect(page.locator('tr[data-run="live"] a')).to_be_focused()
    keys.press("x")
    keys.press("g")
    keys.press("c")
    expect(page.locator("h1")).to_have_text("Compare")
    tab_to(page, page.get_by_role("button", name="Remove live"))
    keys.press("Enter")
    page.get_by_text("No run is selected").wait_for()
    expect(page.locator("body")).not_to_be_focused()


def test_a_run_is_amended_with_the_keyboard_alone(page: Page, runs_dir: Path) -> None:
    page.goto(f"{page.url.partition('#')[0]}#/run/plain")
    page.get_by_role("button", name="Amend").focus()
    page.keyboard.press("Enter")
    page.keyboard.type("checkpoint.keep=7")
    for _ in range(4):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    says = page.get_by_role("dialog").locator(".says")
    expect(says).to_contain_text("checkpoint.keep: 3 -> 7")
    expect(page.locator("[data-confirm]")).to_have_text("Amend")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Amend")).to_be_focused()
    assert of_run(RunPaths(runs_dir / "plain")).checkpoint.keep == 3
    page.keyboard.press("Enter")
    page.keyboard.type("notify.urls=[env:HOME]")
    page.get_by_role("button", name="Check").click()
    expect(says).to_contain_text("can't be changed from the page")


def test_steps_that_are_trained_again_replace_the_former_ones(page: Page, live: RunPaths) -> None:
    page.locator('tr[data-run="live"] a').click()
    lab.until(page, "Boolean(document.querySelector('.plot[data-drawn]'))")
    with JournalWriter(live, "flow", attempt=1) as flow:
        flow.append("attempt_ended", cause="killed", exit_code=137, step=150, evidence="", decision="restart", why="")
    with JournalWriter(live, "flow", attempt=2) as flow:
        flow.append("attempt_started", handle={"launcher": "local", "name": "train", "launch_dir": "/x"})
    with JournalWriter(live, "train-rank00000", attempt=2) as trainer:
        trainer.append("train_started", resumed_from_step=100, tokens=0)
    lab.grow(live, 101, 110, loss=2.5, attempt=2)
    lab.until(page, f"{LOSS}.x.at(-1) === 110")
    steps = page.evaluate(f"{LOSS}.x")
    assert steps == sorted(set(steps))
    assert page.evaluate(f"{LOSS}.y.at(-1)") == 2.5


def test_a_run_that_is_removed_leaves_the_list(page: Page, runs_dir: Path) -> None:
    made = lab.make_run(runs_dir, "brief", 5)
    expect(page.locator('tr[data-run="brief"]')).to_be_visible()
    shutil.rmtree(made.root)
    expect(page.locator('tr[data-run="brief"]')).to_have_count(0)


def test_servers_that_start_are_shown_and_linked_when_they_are_up(page: Page) -> None:
    info = page.evaluate("fetch('/api/info').then((answer) => answer.json())")
    prefect = {"state": "starting", "url": None, "waited_s": 83.0, "log": "/x/prefect.log", "message": ""}
    mlflow = {"state": "up", "url": "http://127.0.0.1:5000", "waited_s": 9.0, "log": None, "message": ""}
    body = json.dumps({**info, "servers": {"prefect": prefect, "mlflow": mlflow}})
    page.route("**/api/info", lambda route: route.fulfill(body=body, content_type="application/json"))
    page.reload()
    expect(page.locator("#servers")).to_contain_text("Prefect: starting, 1 min")
    expect(page.get_by_role("link", name="MLflow")).to_have_attribute("href", "http://127.0.0.1:5000")
