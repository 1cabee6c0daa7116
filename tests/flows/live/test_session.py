"""Only this user's browser is answered, and only the page itself can change something."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flows.live.session import kept_token
from tests.flows.live.conftest import OWN, PORT, TOKEN, MakePage, Page

CONTROL = {"Origin": OWN, "X-Hlatctl": "1"}


def test_the_link_sets_a_cookie_that_scripts_and_other_pages_cannot_use(make_page: MakePage) -> None:
    browser = make_page(logged_in=False).browser
    answer = browser.get(f"/?token={TOKEN}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert f"hlatctl-{PORT}=" in cookie
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert browser.get("/").status_code == 200


@pytest.mark.parametrize("path", ["/", "/?token=wrong", "/?token=", "/api/runs", "/static/index.html", "/nothing"])
def test_nothing_is_answered_without_the_token(make_page: MakePage, path: str) -> None:
    answer = make_page(logged_in=False).browser.get(path)
    assert answer.status_code == 401
    assert "hlatctl ui" in answer.text


def test_health_needs_no_token(make_page: MakePage) -> None:
    assert make_page(logged_in=False).browser.get("/health").text == "OK"


@pytest.mark.parametrize(
    ("header", "status"),
    [(f"Bearer {TOKEN}", 200), ("Bearer wrong", 401), ("Bearer ", 401), ("Bearer ü", 401), (f"Basic {TOKEN}", 401)],
)
def test_programs_use_a_header(make_page: MakePage, header: str, status: int) -> None:
    browser = make_page(logged_in=False).browser
    answer = browser.get("/api/runs", headers={b"Authorization": header.encode("latin-1")})
    assert answer.status_code == status


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1:9"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9"},
    ],
)
def test_other_hosts_and_pages_are_refused_even_with_the_cookie(page: Page, headers: dict[str, str]) -> None:
    assert page.browser.get("/api/runs", headers=headers).status_code == 403


@pytest.mark.parametrize(
    ("site", "status"), [("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403)]
)
def test_a_page_on_another_port_of_this_host_reads_nothing(page: Page, site: str, status: int) -> None:
    assert page.browser.get("/api/runs", headers={"Sec-Fetch-Site": site}).status_code == status
    assert page.browser.get("/", headers={"Sec-Fetch-Site": site}).status_code == 200


def test_the_page_may_load_only_its_own_files(page: Page) -> None:
    answer = page.browser.get("/")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert page.browser.get("/api/runs").headers["cache-control"] == "no-store"
    assert page.browser.get("/static/main.js").headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("action", ["stop", "resume"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": OWN},
        {"X-Hlatctl": "1"},
        {"Origin": "http://evil.example", "X-Hlatctl": "1"},
        {"Origin": OWN, "X-Hlatctl": "2"},
    ],
)
def test_only_the_page_itself_can_change_something(make_page: MakePage, headers: dict[str, str], action: str) -> None:
    page = make_page(allow_control=True)
    assert page.browser.post(f"/api/runs/a/{action}", headers=headers).status_code == 403


def test_a_token_in_a_header_is_not_enough_to_change_something(make_page: MakePage) -> None:
    browser = make_page(allow_control=True, logged_in=False).browser
    headers = {**CONTROL, "Authorization": f"Bearer {TOKEN}"}
    assert browser.post("/api/runs/a/stop", headers=headers).status_code == 403


def test_control_must_be_allowed(page: Page) -> None:
    answer = page.browser.post("/api/runs/a/stop", headers=CONTROL)
    assert answer.status_code == 403
    assert "--allow-control" in answer.json()["hint"]


def test_the_token_stays_and_is_private(tmp_path: Path) -> None:
    first = kept_token(tmp_path)
    assert kept_token(tmp_path) == first
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("how", ["others can read it", "short", "a link", "empty", "not text", "a pipe"])
def test_a_token_that_is_not_private_and_whole_is_replaced(tmp_path: Path, how: str) -> None:
    path, known = tmp_path / "token", "k" * 43
    path.write_text(known)
    path.chmod(0o600)
    if how == "others can read it":
        path.chmod(0o644)
    elif how == "a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path, 0o600)
    else:
        path.write_bytes({"short": b"k", "empty": b"", "not text": b"\xff" * 43}[how])
    token = kept_token(tmp_path)
    assert token != known
    assert len(token) >= 43
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
