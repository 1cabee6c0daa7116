"""How a job under a scheduler ended, from what its nodes wrote and what the scheduler says."""

from __future__ import annotations

import pytest

from flows.launch.base import Status, Verdict
from flows.launch.endings import NodeRecord, conclude
from flows.recovery.failure_causes import end_without_error

HOSTS = ("n1", "n2", "n3")


def asked(host: str) -> NodeRecord:
    return NodeRecord(host=host, code=143, ended_unix_s=1.0, asked_to_stop=True)


def evidence(status: Status) -> str:
    return end_without_error(status, "srun: error: n2: task 1: Exited", more_oom_kills=False).evidence


def test_a_node_without_a_record_is_blamed_and_not_those_that_were_ended_because_of_it() -> None:
    status = conclude("", 127, [asked("n1"), asked("n3")], hosts=HOSTS)
    assert (status.verdict, status.blamed_hosts) == ("node_failed", ("n2",))
    assert evidence(status).startswith("the hardware or system failed on n2 (no record of its start, see the job's log")


def test_a_node_that_was_ended_before_its_program_had_started_is_not_blamed_for_the_failure_of_another_one() -> None:
    failed = NodeRecord(host="n1", code=17, ended_unix_s=1.0, wall_s=0.4)
    status = conclude("", 143, [failed, asked("n3")], hosts=HOSTS)
    assert (status.verdict, status.exit_code, status.blamed_hosts) == ("", 17, ("n1",))
    waited = NodeRecord(host="n1", code=17, ended_unix_s=601.0, wall_s=600.0)
    assert conclude("", 17, [waited, asked("n3")], hosts=HOSTS).blamed_hosts == ("n2",), "it waited for n2"


def test_no_node_is_blamed_if_none_has_a_record() -> None:
    status = conclude("", None, [], hosts=HOSTS)
    assert (status.state, status.verdict, status.blamed_hosts) == ("lost", "", ())
    assert evidence(status) == "no node left a record; runs_dir must be on storage that all nodes share"
    status = conclude("", 1, [], hosts=HOSTS)
    assert (status.state, status.exit_code, status.blamed_hosts) == ("failed", 1, ())


def test_a_node_that_was_killed_because_it_did_not_stop_is_not_blamed_for_the_failure_before() -> None:
    failed, killed = NodeRecord(host="n2", code=1, ended_unix_s=9.0), NodeRecord(host="n1", asked_to_stop=True)
    status = conclude("", 137, [killed, failed, asked("n3")], hosts=HOSTS)
    assert (status.exit_code, status.blamed_hosts) == (1, ("n2",))
    lost = NodeRecord(host="n1")
    assert conclude("", 1, [lost, failed], hosts=("n1", "n2")).blamed_hosts == ("n1",)
    assert conclude("", 143, [killed, asked("n3")], hosts=("n1", "n3")).blamed_hosts == ("n1",), "no other node failed"


@pytest.mark.parametrize("verdict", ["cancelled", "preempted", "time_limit"])
@pytest.mark.parametrize("code", [143, None])
def test_a_job_that_was_ended_from_outside_blames_only_a_node_that_had_failed_by_itself(
    verdict: Verdict, code: int | None
) -> None:
    status = conclude(verdict, code, [asked("n1")], hosts=HOSTS)
    assert (status.state, status.exit_code, status.verdict, status.blamed_hosts) == ("failed", 143, verdict, ())
    failed = NodeRecord(host="n2", code=1, ended_unix_s=0.5)
    assert conclude(verdict, code, [asked("n1"), failed], hosts=HOSTS).blamed_hosts == ("n2",), "before it was ended"
