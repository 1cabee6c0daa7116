"""The node ledger: evidence that fades, suspects that are measured again, offenders that are left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.recovery.node_ledger import (
    EXCLUDED_SCORE,
    HALF_LIFE_S,
    Entry,
    Kind,
    excluded,
    place,
    read,
    record,
    scores,
    suspects,
)
from hlatctl.run.errors import StorageError

NOW = 1e9


def entry(host: str, kind: Kind = "failure", *, age_s: float = 0.0) -> Entry:
    return Entry(time_unix_s=NOW - age_s, host=host, kind=kind, run_id="r", attempt=1, detail="killed")


def test_evidence_weighs_half_as_much_after_its_half_life() -> None:
    assert scores([entry("a"), entry("a", age_s=HALF_LIFE_S)], NOW) == {"a": 1.5}
    assert scores([entry("a", age_s=-3600)], NOW) == {"a": 1.0}, "a clock that is ahead adds nothing"


def test_one_failure_is_no_suspicion_two_are_until_the_host_has_passed() -> None:
    twice = [entry("a"), entry("a"), entry("b")]
    assert suspects(twice[:1], NOW) == set()
    assert suspects(twice[:1], NOW, replaceable=True) == {"a"}, "measuring costs less than a start that fails"
    assert suspects(twice, NOW) == {"a"}
    assert suspects([*twice, entry("a", "preflight_passed")], NOW) == set()
    assert suspects([*twice, entry("a", "preflight_passed"), entry("a"), entry("a")], NOW) == {"a"}


def test_repeat_offenders_are_left_out_though_they_pass_and_come_back_with_time() -> None:
    offender = [entry("a"), entry("a"), entry("a"), entry("a", "preflight_passed")]
    assert excluded(offender, NOW) == {"a"}
    assert excluded(offender, NOW + HALF_LIFE_S) == set()


def test_the_worst_are_left_out_as_far_as_others_can_take_their_place() -> None:
    entries = [*[entry("a")] * 3, *[entry("b")] * 4]
    assert place(("a", "b", "c", "d"), 2, entries, NOW).left_out == ("b", "a")
    one_spare = place(("a", "b", "c"), 2, entries, NOW)
    assert one_spare.left_out == ("b",)
    assert one_spare.message == (
        "left out for what the node ledger holds against it: b; "
        "a has failed repeatedly, but there is no other node to take its place"
    )


def test_a_host_that_is_alone_is_used_whatever_it_has_done_and_that_is_said() -> None:
    placement = place(("here",), 1, [entry("here")] * 9, NOW)
    assert placement.left_out == ()
    assert placement.message == "here has failed repeatedly, but there is no other node to take its place"
    assert place(("here",), 1, [entry("here")], NOW).message == ""


@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(["failure", "straggler", "preflight_passed"]))),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_enough_hosts_always_remain(seen: list[tuple[str, Kind]], there: int, needed: int) -> None:
    hosts = tuple("abcde"[:there])
    entries = [entry(host, kind) for host, kind in seen]
    left_out = place(hosts, needed, entries, NOW).left_out
    assert there - len(left_out) >= min(there, needed)
    assert all(scores(entries, NOW)[host] >= EXCLUDED_SCORE for host in left_out)


def test_what_is_recorded_is_read_again_and_a_torn_line_hides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "nodes.jsonl"
    assert read(path) == []
    record(path, [entry("a"), entry("b", "straggler")])
    with path.open("a") as file:
        file.write('{"host": "torn')
    record(path, [entry("c", "preflight_passed")])
    assert read(path) == [entry("a"), entry("b", "straggler"), entry("c", "preflight_passed")]


_RECORD_MANY = """
import sys
from pathlib import Path
from flows.recovery.node_ledger import Entry, record
one = Entry(time_unix_s=0.0, host=sys.argv[2], kind="failure", run_id="r", attempt=1, detail="killed")
for _ in range(50):
    record(Path(sys.argv[1]), [one, one])
"""


def test_several_runs_write_at_once_and_no_line_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "nodes.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", _RECORD_MANY, path, host]) for host in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    hosts = [found.host for found in read(path)]
    assert (hosts.count("a"), hosts.count("b")) == (100, 100)


def test_a_ledger_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/nodes\.jsonl: can't be written"):
        record(tmp_path / "file" / "nodes.jsonl", [entry("a")])


def test_a_rejected_host_rests_until_a_day_has_passed_or_newer_ones_need_its_place() -> None:
    def rejection(host: str, at_s: float) -> Entry:
        return Entry(time_unix_s=at_s, host=host, kind="preflight_failed", run_id="r", attempt=0)

    hosts = ("a", "b", "c", "d")
    entries = [rejection("a", 0.0), rejection("b", 10.0)]
    assert place(hosts, 2, entries, 20.0).left_out == ("b", "a")
    assert place(hosts, 2, [*entries, rejection("c", 30.0)], 40.0).left_out == ("c", "b"), "a may be mended by now"
    assert "a" in suspects(entries, 90_000.0), "and is measured again before it is used"
    assert place(hosts, 2, entries, 90_000.0).left_out == ()
    passed = Entry(time_unix_s=50.0, host="b", kind="preflight_passed", run_id="r", attempt=0)
    assert place(hosts, 2, [*entries, passed], 60.0).left_out == ("a",)
