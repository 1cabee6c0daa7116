"""What a person does with the page: find runs, compare them, look at one, all by mouse, keyboard or phone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser import lab
from tests.waiting import wait_for

pytestmark = pytest.mark.processes


def go(page: Page, fragment: str) -> None:
    page.goto(f"{page.url.partition('#')[0]}#{fragment}")


def runs(page: Page) -> list[str]:
    rows = page.locator("tr[data-run]")
    return [str(rows.nth(index).get_attribute("data-run")) for index in range(rows.count())]


def drawn(page: Page, title: str = "Loss") -> None:
    page.locator("section.chart", has_text=title).locator(".plot[data-drawn]").first.wait_for(state="attached")


def x_range(page: Page) -> list[float]:
    found: list[float] = page.evaluate("document.querySelector('.plot').chart.scales.x.ends")
    return found


def points(page: Page) -> int:
    """Return how many points of the loss lie in the visible range."""
    found: int = page.evaluate(
        "(() => { const {lines, scales} = document.querySelector('.plot').chart, [a, b] = scales.x.ends;"
        " return lines.find((d) => d.meta).x.filter((x) => x >= a && x <= b).length; })()"
    )
    return found


def test_the_list_shows_runs_and_hides_simulated_ones(page: Page) -> None:
    assert set(runs(page)) == {"plain", "other", "live", "hostile", "beta2"}
    expect(page.locator(".summary")).to_contain_text("1 simulated run hidden")
    row = page.locator('tr[data-run="plain"]')
    expect(row).to_contain_text("baseline")
    expect(row).to_contain_text("finished")
    expect(row).to_contain_text("model=tiny")
    expect(row).to_contain_text("the first corpus")
    expect(row.locator(".c-scores")).to_contain_text("mmlu")
    expect(row.locator("svg.spark path")).to_have_attribute("d", re.compile("^M0 0L.*L39 "))
    page.get_by_label("simulated").check()
    expect(page.locator('tr[data-run="dry"] .mark')).to_have_text("simulated")


def test_a_filter_keeps_rows_and_the_address_keeps_the_filter(page: Page) -> None:
    page.get_by_label("Filter runs").fill("first CORPUS")
    expect(page.locator("tr[data-run]")).to_have_count(1)
    assert runs(page) == ["plain"]
    page.reload()
    expect(page.get_by_label("Filter runs")).to_have_value("first CORPUS")
    expect(page.locator("tr[data-run]")).to_have_count(1)
    page.get_by_label("Filter runs").fill("")
    page.get_by_label("Status", exact=True).select_option("finished")
    expect(page.locator("tr[data-run]")).to_have_count(2)
    page.get_by_label("Tag", exact=True).select_option("model=tiny")
    expect(page.locator("tr[data-run]")).to_have_count(1)


def test_columns_sort_both_ways_with_unknown_values_last(page: Page) -> None:
    head = page.get_by_role("button", name="Val. loss")
    head.click()
    expect(page.locator("th[aria-sort]")).to_have_attribute("aria-sort", "ascending")
    assert runs(page)[:2] == ["other", "plain"]
    head.click()
    expect(page.locator("th[aria-sort]")).to_have_attribute("aria-sort", "descending")
    assert runs(page)[:2] == ["plain", "other"]


def test_a_sweep_is_one_row_until_it_is_unfolded(page: Page) -> None:
    sweep = page.get_by_role("button", name="beta2")
    expect(sweep).to_have_attribute("aria-expanded", "false")
    sweep.click()
    expect(page.locator('tr[data-run^="beta2-t"]')).to_have_count(3)
    page.reload()
    expect(page.locator('tr[data-run^="beta2-t"]')).to_have_count(3)
    expect(page.locator('tr[data-run="beta2-t0001"] [data-column="set:optimizer.lr"]')).to_have_text("0.002")
    expect(page.locator('tr[data-run="beta2"] [data-column="set:optimizer.lr"]')).to_have_text("0.001–0.003")


def test_groups_are_folded_selected_and_left_by_keyboard(page: Page) -> None:
    page.get_by_label("Filter runs").fill("group:none")
    expect(page.locator("tr.group")).to_have_count(0)
    page.get_by_label("Group", exact=True).select_option("experiment")
    expect(page.get_by_label("Filter runs")).to_have_value("")
    rows, group = page.locator("tr[data-run]"), page.locator("tr.group")
    expect(rows).to_have_count(1)
    expect(group.locator(".counted")).to_have_text("7 runs")
    expect(group.locator('[data-column="loss"] small')).to_have_text(re.compile(r"^[\d.]+–[\d.]+$"))
    page.get_by_label("Filter runs").press("ArrowDown")
    page.keyboard.press("ArrowRight")
    expect(rows).to_have_count(8)
    page.keyboard.press("x")
    expect(page.get_by_role("link", name="Compare 7 runs")).to_be_visible()
    page.keyboard.press("End")
    expect(rows.last.locator("[data-focus=open]")).to_be_focused()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(rows).to_have_count(1)
    expect(group.locator("[data-focus=open]")).to_be_focused()
    page.get_by_role("button", name="Unfold all").click()
    expect(rows).to_have_count(8)


def test_columns_are_chosen_and_a_named_view_keeps_them(page: Page) -> None:
    page.get_by_role("button", name="Columns").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Progress").uncheck()
    dialog.get_by_label("model", exact=True).check()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Columns")).to_be_focused()
    expect(page.get_by_role("columnheader", name="Progress")).to_have_count(0)
    expect(page.locator('tr[data-run="plain"] [data-column="tag:model"]')).to_have_text("tiny")
    page.get_by_role("button", name="model").click()
    assert runs(page)[0] == "plain", "unknown values are last"
    page.get_by_role("button", name="Views").click()
    dialog.get_by_label("Name of the shown view").fill("by model")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="View: by model")).to_be_focused()
    go(page, "/runs")
    expect(page.get_by_role("columnheader", name="Progress")).to_be_visible()
    page.get_by_role("button", name="Views").click()
    dialog.get_by_role("link", name="by model").click()
    expect(page.get_by_role("columnheader", name="Progress")).to_have_count(0)
    page.get_by_role("button", name="View: by model").click()
    dialog.get_by_role("button", name="Remove by model").click()
    dialog.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Columns").click()
    dialog.get_by_role("button", name="Default columns").click()
    expect(dialog.get_by_label("Progress")).to_be_checked()


def test_the_page_of_a_sweep_ranks_its_arms_and_links_to_its_trials(page: Page) -> None:
    page.get_by_role("link", name="beta2", exact=True).click()
    arms = page.get_by_role("region", name="Arms")
    expect(arms.locator("tbody tr").first).to_contain_text("3.1")
    expect(arms.locator("tbody tr").nth(1)).to_contain_text("+0.4")
    drawn(page, "Settings and objective of each arm")
    drawn(page, "Best so far")
    go(page, "/run/beta2")
    page.wait_for_url(re.compile("#/sweep/beta2"))
    page.get_by_role("link", name="t0001").first.click()
    expect(page.locator("h1")).to_have_text("beta2-t0001")


def test_a_filter_asks_for_fields(page: Page) -> None:
    cases = (("status:finished loss<4", {"plain", "other"}), ("lr>=0.4", {"other"}), ("model:tiny", {"plain"}))
    for words, expected in cases:
        page.get_by_label("Filter runs").fill(words)
        expect(page.locator("tr[data-run]")).to_have_count(len(expected))
        assert set(runs(page)) == expected


def test_an_unknown_address_says_so(page: Page) -> None:
    go(page, "/rums")
    expect(page.locator("h1")).to_have_text("No such page")
    page.get_by_role("link", name="Show all runs").click()
    expect(page.locator('tr[data-run="plain"]')).to_be_visible()


def test_text_from_runs_is_never_html(page: Page) -> None:
    expect(page.locator('tr[data-run="hostile"]')).to_contain_text("<img src=x onerror")
    for view in ("/run/hostile", "/run/hostile?tab=history", "/compare?runs=hostile,plain"):
        go(page, view)
        expect(page.locator("main")).to_contain_text("<img src=x onerror")
        assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
        assert page.evaluate("window.hacked") is None


def test_selected_runs_are_compared(page: Page) -> None:
    page.get_by_label("Select baseline").check()
    page.get_by_label("Select other").check()
    page.get_by_role("link", name="Compare 2 runs").click()
    drawn(page)
    expect(page.locator(".legend li")).to_have_count(2)
    expect(page.locator("main")).to_contain_text("optimizer.lr")
    expect(page.get_by_role("region", name="Settings that differ")).to_contain_text("0.006")
    scores = page.get_by_role("region", name="Scores")
    expect(scores).to_contain_text("35 ± 0.4")
    page.get_by_label("Published scores").select_option("hlat")
    expect(scores).to_contain_text("HLAT")
    assert "baselines=hlat" in page.url


def test_the_address_of_a_comparison_restores_axis_smoothing_metrics_and_zoom(page: Page) -> None:
    go(page, "/compare?runs=plain,other&x=step&smooth=0.8&keys=loss,grad_norm&zoom=50:150&logy=1")
    drawn(page)
    page.locator("section.chart", has_text="Gradient norm").scroll_into_view_if_needed()
    drawn(page, "Gradient norm")
    expect(page.get_by_label("Over", exact=True)).to_have_value("step")
    expect(page.get_by_label("Smoothing", exact=True)).to_have_value("0.8")
    assert x_range(page) == [50, 150]
    page.get_by_role("checkbox", name="Gradient norm").uncheck()
    expect(page.locator("section.chart", has_text="Gradient norm")).to_have_count(0)
    page.get_by_role("button", name="Reset zoom").click()
    lab.until(page, "document.querySelector('.plot').chart.scales.x.ends[1] > 300")
    assert "zoom" not in page.url
    assert "smooth=0.8" in page.url


def test_dragging_in_a_chart_zooms_and_a_double_click_zooms_out(page: Page) -> None:
    go(page, "/run/plain")
    drawn(page)
    box = page.locator(".plot").first.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.4, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, middle, steps=5)
    page.mouse.up()
    page.wait_for_url(re.compile("zoom="))
    first, last = x_range(page)
    assert 80 < first < 160 < last < 220
    norm = page.locator("section.chart", has_text="Parameter norm")
    norm.scroll_into_view_if_needed()
    drawn(page, "Parameter norm")
    assert norm.locator(".plot").evaluate("(plot) => plot.chart.scales.x.ends") == [first, last]
    page.locator(".plot").first.scroll_into_view_if_needed()
    box = page.locator(".plot").first.bounding_box()
    assert box is not None
    page.mouse.dblclick(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2)
    lab.until(page, "!location.hash.includes('zoom=')")
    lab.until(page, "document.querySelector('.plot').chart.scales.x.ends[1] > 300")


def test_one_crosshair_shows_a_place_and_its_values_in_all_charts(page: Page) -> None:
    go(page, "/run/plain")
    drawn(page)
    crosshair = page.get_by_role("slider", name="Crosshair")
    box = page.locator(".plot").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2)
    expect(crosshair).to_contain_text(re.compile(r"step 15\d.* tokens2023-11-14 .* after the first step"))
    norm = page.locator("section.chart", has_text="Gradient norm")
    for chart in (page.locator("section.chart").first, norm):
        expect(chart.locator(".values")).to_have_text(re.compile(r"^\d\.\d+$"))
        expect(chart.locator(".crosshair-line")).to_be_visible()
    page.mouse.move(5, 5)
    expect(norm.locator(".crosshair-line")).to_be_hidden()


def test_the_crosshair_moves_by_keys_to_points_and_marks(page: Page) -> None:
    go(page, "/run/plain")
    drawn(page)
    crosshair = page.get_by_role("slider", name="Crosshair")
    crosshair.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(crosshair).to_contain_text("step 2")
    page.keyboard.press("PageDown")
    expect(crosshair).to_contain_text("step 102")
    expect(crosshair).to_contain_text("milestone at 833.3K tokens")
    expect(crosshair).to_have_attribute("aria-valuetext", re.compile("Loss 3.9, Validation loss 3.75"))
    page.keyboard.press("Escape")
    expect(crosshair).not_to_contain_text("step 102")


def test_a_pinned_chart_is_first_in_every_run(page: Page) -> None:
    go(page, "/run/plain")
    drawn(page)
    page.get_by_role("button", name="Pin Parameter norm").click()
    expect(page.locator("section.chart h2").first).to_have_text("Parameter norm")
    go(page, "/run/other")
    expect(page.locator("h1")).to_have_text("other")
    expect(page.locator("section.chart h2").first).to_have_text("Parameter norm")
    page.get_by_role("button", name="Unpin Parameter norm").click()
    expect(page.locator("section.chart h2").first).to_have_text(re.compile("Loss"))


def test_a_zoom_reads_finer_curves(page: Page, runs_dir: object) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/curves" in request.url else None)
    go(page, "/run/plain?zoom=100:120")
    drawn(page)
    lab.until(page, "document.querySelector('.plot').chart.scales.x.ends[0] === 100")
    wait_for(lambda: points(page) == 21)
    assert any("from=" in url and "to=" in url for url in asked)


def test_the_page_of_a_run_shows_its_history_scores_and_settings(page: Page) -> None:
    go(page, "/run/plain")
    expect(page.get_by_role("heading", level=1)).to_have_text("baseline")
    drawn(page)
    page.get_by_role("tab", name="History").click()
    expect(page.get_by_role("region", name="Attempts")).to_contain_text("finished")
    page.get_by_role("tab", name="Evaluation").click()
    expect(page.get_by_role("region", name="Milestones")).to_contain_text("0.35 ± 0.004")
    page.get_by_role("tab", name="Samples").click()
    expect(page.locator(".samples")).to_contain_text("upon a time <img")
    page.get_by_role("tab", name="Logs").click()
    expect(page.get_by_role("region", name="Log")).to_contain_text("<img src=x")
    assert page.evaluate("window.hacked") is None
    page.get_by_role("tab", name="Settings").click()
    expect(page.get_by_role("region", name="Changed on the command line")).to_contain_text("optimizer.lr")
    expect(page.get_by_role("region", name="Other than the default")).to_contain_text("optimizer.warmup_steps")
    page.get_by_label("Filter settings").fill("optimizer.lr")
    expect(page.get_by_role("region", name="Settings")).to_contain_text("0.003")


def test_the_times_of_ranks_are_a_heat_map_where_they_are_recorded(page: Page) -> None:
    go(page, "/run/plain")
    chart = page.locator("section.chart", has_text="Time of the slowest ranks for own work")
    chart.scroll_into_view_if_needed()
    chart.locator(".heatmaplayer image").first.wait_for(state="attached")
    assert chart.locator(".plot").evaluate("(plot) => plot.data[0].y") == ["0", "1", "2"]
    go(page, "/run/live")
    drawn(page)
    expect(page.locator("section.chart", has_text="slowest ranks")).to_have_count(0)


def test_the_keyboard_reaches_everything(page: Page) -> None:
    page.keyboard.press("/")
    expect(page.get_by_label("Filter runs")).to_be_focused()
    page.keyboard.type("plain")
    expect(page.locator("tr[data-run]")).to_have_count(1)
    page.keyboard.press("Escape")
    page.locator("tr[data-run] a").first.focus()
    page.keyboard.press("x")
    expect(page.get_by_label("Select baseline")).to_be_checked()
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.wait_for_url(re.compile("/compare.runs=plain"))
    page.keyboard.press("g")
    page.keyboard.press("r")
    page.wait_for_url(re.compile("#/runs$"))
    page.locator('tr[data-run="plain"] a').focus()
    page.keyboard.press("Enter")
    page.get_by_role("tab", name="Curves").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="History")).to_be_focused()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()


def test_every_control_has_a_name_and_a_visible_focus(page: Page) -> None:
    for view in ("/runs", "/run/plain", "/compare?runs=plain,other"):
        go(page, view)
        page.wait_for_selector("main button, main select")
        nameless = page.evaluate(
            "[...document.querySelectorAll('button, a, input, select')].filter((e) => e.checkVisibility() &&"
            " !e.textContent.trim() && !e.ariaLabel && !e.closest('.js-plotly-plot')"
            " && ![...(e.labels || [])].some((label) => label.textContent.trim()))"
            ".map((e) => e.outerHTML)"
        )
        assert nameless == []
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize(
    "view", ["/runs", "/run/plain", "/run/plain?tab=history", "/run/plain?tab=settings", "/compare?runs=plain,other"]
)
def test_a_phone_never_scrolls_sideways(browser: Browser, server: lab.Server, view: str) -> None:
    with lab.opened(browser, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True) as context:
        page = context.new_page()
        page.goto(f"{server.link}#{view}")
        page.wait_for_selector("tr[data-run], .plot[data-drawn], main td")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        if view == "/run/plain":
            box = page.locator(".plot").first.bounding_box()
            assert box is not None
            assert box["y"] + box["height"] < 844, "the first chart is not within the first screen"


def test_the_theme_follows_the_system_and_the_switch(browser: Browser, server: lab.Server) -> None:
    colour = "getComputedStyle(document.documentElement).backgroundColor"
    with lab.opened(browser, color_scheme="dark") as context:
        page = context.new_page()
        page.goto(server.link)
        dark = page.evaluate(colour)
        page.get_by_role("button", name="Theme: auto").click()
        assert page.evaluate(colour) != dark
        page.reload()
        page.get_by_role("button", name="Theme: light").click()
        assert page.evaluate(colour) == dark


def test_five_thousand_runs_are_listed_and_filtered_at_once(page: Page) -> None:
    row = page.evaluate("fetch('/api/runs').then((answer) => answer.json())")["rows"][0]
    rows = [
        {**row, "run_id": f"run-{n:04d}", "name": "", "sweep": "", "simulated": False, "note": f"colour{n % 7}"}
        for n in range(5000)
    ]
    body = json.dumps({"complete": True, "revision": 1, "rows": rows})
    page.route("**/api/runs", lambda route: route.fulfill(body=body, content_type="application/json"))
    page.reload()
    expect(page.locator(".summary")).to_contain_text("5,000 runs")
    assert page.locator("tr[data-run]").count() < 80
    page.locator("#list").evaluate("(list) => { list.scrollTop = list.scrollHeight; }")
    expect(page.locator("tr[data-run]").last).to_have_attribute("aria-rowindex", "5001")
    page.get_by_label("Filter runs").fill("colour3 run-49")
    expect(page.locator(".summary")).to_contain_text(f"{sum(n % 7 == 3 for n in range(4900, 5000))} runs of 5,000")


def test_control_is_not_offered_and_is_refused(page: Page) -> None:
    go(page, "/run/live")
    expect(page.get_by_role("heading", level=1)).to_have_text("live")
    expect(page.locator("[data-action]")).to_have_text("Alerts")
    page.locator("[data-action]").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("No service is configured")
    expect(dialog.get_by_label("Training makes no progress")).to_be_disabled()
    expect(dialog.get_by_role("button")).to_have_text("Close")
    page.keyboard.press("Escape")
    status = page.evaluate(
        "fetch('/api/runs/live/stop', {method: 'POST', headers: {'X-Hlatctl': '1'}}).then((a) => a.status)"
    )
    assert status == 403


def test_a_tag_with_a_space_stays_one_tag(page: Page) -> None:
    page.route("**/api/info", lambda route: route.fulfill(json={**route.fetch().json(), "allow_control": True}))
    page.route("**/labels?*", lambda route: route.fulfill(status=202, json={}))
    go(page, "/run/live")
    page.reload()
    page.locator("[data-action=label]").click()
    page.get_by_label("Tags, one a line").fill("owner=two words\nmodel=small\n")
    with page.expect_request("**/labels?*") as asked:
        page.get_by_role("button", name="Save").click()
    assert asked.value.url.partition("?")[2] == "tag=owner%3Dtwo+words&tag=model%3Dsmall"


def test_a_page_without_the_token_says_what_to_do(browser: Browser, server: lab.Server) -> None:
    with lab.opened(browser) as context:
        page = context.new_page()
        answer = page.goto(server.origin)
        assert answer is not None
        assert answer.status == 401
        expect(page.locator("body")).to_contain_text("hlatctl ui")


def test_items_of_a_score_are_shown_page_by_page_and_by_what_has_changed(page: Page) -> None:
    go(page, "/run/plain?tab=evaluation")
    page.get_by_role("button", name="show items").click()
    items, says = page.locator("article.item"), page.locator("section > p.summary")
    expect(says).to_contain_text("Items 1 to 9 of 9; the task has 12.")
    expect(items.first).to_contain_text(lab.HOSTILE)
    assert page.evaluate("window.hacked") is None
    before = len(items.first.inner_text())
    items.first.get_by_role("button", name="Show all").click()
    assert len(items.first.inner_text()) > before + 1_000
    page.get_by_label("Show", exact=True).select_option("all")
    page.get_by_role("button", name="Next").click()
    expect(says).to_contain_text("Items 11 to 12 of 12")
    page.get_by_label("Compare with").select_option(label="833.3K tokens")
    expect(says).to_contain_text("Items 1 to 3 of 3")
    expect(items.first).to_contain_text("before: wrong")
    assert "show=gained" in page.url


def test_a_shared_file_opens_from_a_disk_without_a_network(page: Page, browser: Browser, tmp_path: Path) -> None:
    go(page, "/compare?runs=plain,other,hostile&x=step")
    drawn(page)
    page.get_by_role("button", name="Share").click()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as file").click()
    saved.value.save_as(tmp_path / "shared.html")
    problems: list[str] = []
    with lab.opened(browser, offline=True) as context:
        copy = context.new_page()
        copy.on("pageerror", lambda error: problems.append(str(error)))
        copy.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
        copy.goto((tmp_path / "shared.html").as_uri())
        drawn(copy)
        assert "x=step" in copy.url
        expect(copy.locator("aside.copy")).to_contain_text("Curves have at most 3,000 points.")
        expect(copy.locator('[aria-label="Scores"]')).to_contain_text("45 ± 0.4")
        for axis in ("time", "tokens", "flops"):
            copy.get_by_label("Over", exact=True).select_option(axis)
            drawn(copy)
        copy.locator(".legend a", has_text="baseline").click()
        drawn(copy)
        for tab, says in (
            ("Evaluation", "Milestones"),
            ("Samples", "upon a time"),
            ("Logs", "This file doesn't contain"),
        ):
            copy.get_by_role("tab", name=tab).click()
            expect(copy.locator("#panel")).to_contain_text(says)
        copy.get_by_role("link", name="Runs").click()
        expect(copy.locator("tr[data-run]")).to_have_count(3)
        assert copy.evaluate("window.hacked") is None
    assert problems == []
