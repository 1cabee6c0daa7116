"""Which hosts the end of an attempt is held against."""

from __future__ import annotations

import pytest

from flows.launch.base import Status
from flows.recovery.blame import blamed_hosts
from flows.recovery.failure_causes import Cause

HOSTS = ("n1", "n2")


@pytest.mark.parametrize(
    ("cause", "blamed", "expected"),
    [
        ("node_failed", ("n2",), ("n2",)),
        ("node_failed", HOSTS, HOSTS),
        ("killed", ("n2",), ("n2",)),
        ("lost", HOSTS, ()),
        ("hang", ("n2",), ()),
        ("crashed", ("n2",), ()),
        ("preempted", ("n2",), ()),
        ("time_limit", ("n2",), ()),
        ("cancelled", ("n2",), ()),
    ],
)
def test_only_the_hosts_that_the_launcher_blames_are_blamed(
    cause: Cause, blamed: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    status = Status(state="failed", hosts=HOSTS, blamed_hosts=blamed)
    assert blamed_hosts(cause, status, ("n1", "n3"), "n3") == expected


def test_a_launcher_that_names_no_hosts_leaves_the_only_one_or_the_one_that_torchrun_names() -> None:
    status = Status(state="failed")
    assert blamed_hosts("killed", status, ("here",), "") == ("here",)
    assert blamed_hosts("killed", status, HOSTS, "n2") == ("n2",)
    assert blamed_hosts("killed", status, HOSTS, "localhost") == ()
