"""Sends one message with Apprise. No part of a URL leaves this module in a log, an error or a traceback.

Apprise and urllib3 log addresses, so logging is off while they work.
"""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from conf import tracking
from flows.tracking.notify.notes import Message
from hlatctl.run.errors import ConfigError

#: A service that takes longer counts as unreachable.
TIMEOUT_S = 20.0
_TYPES = {"finished": "success", "failed": "failure"} | dict.fromkeys(
    ("needs_person", "budget", "alarm", "loss_spike", "stall"), "warning"
)


def send(entry: str, message: Message, *, timeout_s: float = TIMEOUT_S) -> str:
    """Send a message; must be called in the main thread.

    Args:
        entry: an entry of ``notify.urls``.
        message: message to send.
        timeout_s: seconds after which to give up.

    Returns:
        Empty, or why the message was not sent, without the URL.
    """
    try:
        url = tracking.resolve_notify_url(entry)
    except ConfigError as error:
        return error.message
    try:
        with _silence(), _within(timeout_s):
            return _send(entry, url, message)
    except _LateError:
        return f"{entry}: the service did not answer within {timeout_s:g} s"
    except ImportError:
        return f"{entry}: the package apprise is not installed"
    except Exception as error:  # any error of Apprise's services; its text can contain the URL
        return f"{entry}: can't be used ({type(error).__name__})"


def _send(entry: str, url: str, message: Message) -> str:
    import apprise

    # One service at a time in this thread, where the time limit works.
    asset = apprise.AppriseAsset(async_mode=False, app_id="hlatctl", app_desc="hlatctl", storage_mode="memory")
    service = apprise.Apprise(asset=asset)
    if not service.add(url):
        return f"{entry}: contains no URL that Apprise knows"
    kind = apprise.NotifyType(_TYPES.get(message.kind, "info"))
    sent = service.notify(
        body=message.body, title=message.title, notify_type=kind, body_format=apprise.NotifyFormat.TEXT
    )
    return "" if sent else f"{entry}: the service doesn't answer, or rejects the message"


class _LateError(BaseException):
    """Not an Exception, so that Apprise doesn't catch it."""


@contextmanager
def _within(timeout_s: float) -> Iterator[None]:
    """Interrupt the block after a time; a service that answers byte by byte would last forever."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise _LateError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _silence() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
