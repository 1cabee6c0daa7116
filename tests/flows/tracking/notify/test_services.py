"""Messages go to a real webhook; a slow or broken one is named, and its URL is not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flows.tracking.notify import services
from flows.tracking.notify.notes import Message
from tests.flows.tracking.notify.conftest import ENTRY, TOKEN, Hook

MESSAGE = Message(kind="failed", title="one: failed", body="What happened: <b>x</b>", time_unix_s=0.0)


def test_a_webhook_gets_title_text_and_severity(hook: Hook) -> None:
    assert services.send(ENTRY, MESSAGE) == ""
    (got,) = hook.messages
    assert (got["title"], got["message"], got["type"]) == ("one: failed", "What happened: <b>x</b>", "failure")


def test_a_webhook_that_answers_500_is_named_without_its_url(
    hook: Hook, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    hook.status = 500
    with caplog.at_level(logging.DEBUG):
        problem = services.send(ENTRY, MESSAGE)
    assert problem == "env:HOOK_URL: the service doesn't answer, or rejects the message"
    out = capfd.readouterr()
    assert TOKEN not in caplog.text + out.out + out.err


def test_a_webhook_that_answers_byte_by_byte_is_given_up(hook: Hook) -> None:
    hook.hangs = True
    problem = services.send(ENTRY, MESSAGE, timeout_s=0.3)
    assert problem == "env:HOOK_URL: the service did not answer within 0.3 s"


def test_a_url_that_no_service_has_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_URL", f"nosuch://{TOKEN}")
    assert services.send(ENTRY, MESSAGE) == "env:HOOK_URL: contains no URL that Apprise knows"


def test_a_file_of_mode_600_names_the_service_and_another_mode_is_refused(hook: Hook, tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text(hook.url + "\n", encoding="utf-8")
    path.chmod(0o600)
    assert services.send(f"file:{path}", MESSAGE) == ""
    path.chmod(0o640)
    assert "others can read it (mode 640" in services.send(f"file:{path}", MESSAGE)
    assert len(hook.messages) == 1
