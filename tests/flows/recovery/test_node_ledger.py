"""The node ledger: which hosts are blamed for the end of an attempt, how entries fade, and which hosts are excluded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.launch.base import Allocation, Job, Status
from flows.recovery.failure_causes import Cause
from flows.recovery.node_ledger import (
    EXCLUDED_SCORE,
    HALF_LIFE_S,
    Entry,
    Kind,
    Nodes,
    blamed_hosts,
    newly_passed,
    place,
    read,
    record,
    scores,
    suspects,
)
from hlatctl.run.errors import StorageError
from hlatctl.run.state import AttemptState

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


NOW = 1e9


def entry(host: str, kind: Kind = "failure", *, age_s: float = 0.0) -> Entry:
    return Entry(time_unix_s=NOW - age_s, host=host, kind=kind, run_id="r", attempt=1, detail="killed")


def test_an_entry_weighs_half_as_much_after_its_half_life() -> None:
    assert scores([entry("a"), entry("a", age_s=HALF_LIFE_S)], NOW) == {"a": 1.5}
    assert scores([entry("a", age_s=-3600)], NOW) == {"a": 1.0}, "a clock that is ahead adds nothing"


def test_a_host_is_a_suspect_after_two_failures_until_it_passes() -> None:
    twice = [entry("a"), entry("a"), entry("b")]
    assert suspects(twice[:1], NOW) == set()
    assert suspects(twice[:1], NOW, replaceable=True) == {"a"}, "a measurement costs less than a failed start"
    assert suspects(twice, NOW) == {"a"}
    assert suspects([*twice, entry("a", "preflight_passed")], NOW) == set()
    assert suspects([*twice, entry("a", "preflight_passed"), entry("a"), entry("a")], NOW) == {"a"}


def test_hosts_that_failed_repeatedly_are_excluded_even_if_they_pass_and_return_with_time() -> None:
    offender = [entry("a"), entry("a"), entry("a"), entry("a", "preflight_passed")]
    assert place(("a", "b"), 1, offender, NOW).left_out == ("a",)
    assert place(("a", "b"), 1, offender, NOW + HALF_LIFE_S).left_out == ()


def test_a_fault_that_preflight_finds_again_and_again_counts_once() -> None:
    failed, passed = entry("a", "preflight_failed"), entry("a", "preflight_passed")
    assert scores([failed] * 9, NOW) == {"a": 1.0}
    assert scores([failed, passed, failed, entry("a"), failed], NOW) == {"a": 4.0}


def test_a_passed_preflight_is_news_of_a_host_that_is_new_or_failed() -> None:
    entries = [entry("a"), entry("a", "preflight_passed"), entry("b", "preflight_passed"), entry("b", "straggler")]
    assert newly_passed(entries, ["a", "b", "c"]) == ["b", "c"]


def test_the_worst_hosts_are_left_out_as_far_as_others_can_replace_them() -> None:
    entries = [*[entry("a")] * 3, *[entry("b")] * 4]
    assert place(("a", "b", "c", "d"), 2, entries, NOW).left_out == ("b", "a")
    one_spare = place(("a", "b", "c"), 2, entries, NOW)
    assert one_spare.left_out == ("b",)
    assert one_spare.message == (
        "left out because of the node ledger: b; a has failed repeatedly, but no other node can replace it"
    )


def test_the_only_host_is_used_with_a_message() -> None:
    placement = place(("here",), 1, [entry("here")] * 9, NOW)
    assert placement.left_out == ()
    assert placement.message == "here has failed repeatedly, but no other node can replace it"
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


def test_recorded_entries_are_read_without_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "nodes.jsonl"
    assert read(path) == []
    record(path, [entry("a"), entry("b", "straggler")])
    with path.open("a") as file:
        file.write('{"host": "torn')
    record(path, [entry("c", "preflight_passed")])
    assert read(path) == [entry("a"), entry("b", "straggler"), entry("c", "preflight_passed")]


def test_a_ledger_that_grew_or_was_edited_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "nodes.jsonl"
    record(path, [entry("a"), entry("b")])
    assert [each.host for each in read(path)] == ["a", "b"]
    record(path, [entry("c")])
    assert [each.host for each in read(path)] == ["a", "b", "c"]
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    record(path, [entry("d"), entry("e")])
    assert [each.host for each in read(path)] == ["b", "c", "d", "e"]


_RECORD_MANY = """
import sys
from pathlib import Path
from flows.recovery.node_ledger import Entry, record
one = Entry(time_unix_s=0.0, host=sys.argv[2], kind="failure", run_id="r", attempt=1, detail="killed")
for _ in range(50):
    record(Path(sys.argv[1]), [one, one])
"""


@pytest.mark.processes
def test_several_runs_write_at_once_without_damaging_lines(tmp_path: Path) -> None:
    path = tmp_path / "nodes.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", _RECORD_MANY, path, host]) for host in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    hosts = [entry.host for entry in read(path)]
    assert (hosts.count("a"), hosts.count("b")) == (100, 100)


def test_a_ledger_that_cannot_be_written_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/nodes\.jsonl: can't be written"):
        record(tmp_path / "file" / "nodes.jsonl", [entry("a")])


@pytest.mark.parametrize("kind", ["preflight_failed", "corruption"])
def test_a_rejected_host_is_not_used_for_a_day_or_until_newer_rejections_need_the_room(kind: Kind) -> None:
    def rejection(host: str, at_s: float) -> Entry:
        return Entry(time_unix_s=at_s, host=host, kind=kind, run_id="r", attempt=0)

    hosts = ("a", "b", "c", "d")
    entries = [rejection("a", 0.0), rejection("b", 10.0)]
    assert place(hosts, 2, entries, 20.0).left_out == ("b", "a")
    assert place(hosts, 2, [*entries, rejection("c", 30.0)], 40.0).left_out == ("c", "b"), "a may be repaired by now"
    assert "a" in suspects(entries, 90_000.0), "it is measured again before it is used"
    assert place(hosts, 2, entries, 90_000.0).left_out == ()
    passed = Entry(time_unix_s=50.0, host="b", kind="preflight_passed", run_id="r", attempt=0)
    assert place(hosts, 2, [*entries, passed], 60.0).left_out == ("a",)


def test_nodes_are_measured_before_an_attempt_if_a_suspect_has_no_substitute_or_an_unknown_one_may_have_failed(
    tmp_path: Path,
) -> None:
    def why(hosts: str, kept: str = "", cause: str = "lost", blamed: str = "") -> str:
        kept_nodes = Allocation(name="kept", hosts=tuple(kept)) if kept else None
        launcher: Any = SimpleNamespace(hosts=lambda needed: tuple(hosts), allocation=lambda job: kept_nodes)
        ended = AttemptState(1, {}, 0.0, cause=cause, blamed_hosts=list(blamed))
        return Nodes(path, launcher, 2, lambda: NOW).why_measure(job, ended)

    path = tmp_path / "nodes.jsonl"
    job = Job(name="train", run_dir=tmp_path, argv=(), launch_dir=tmp_path, log_dir=tmp_path, nodes=2)
    assert why("abc") == "one of them may have failed"
    assert why("abc", blamed="a") == why("abc", cause="preempted") == ""
    record(path, [entry("a")])
    assert why("abc", blamed="a") == "a failed before", "with a spare host, one failure is enough"
    assert why("ab", blamed="a") == ""
    assert why("abc", kept="abc", blamed="a") == "", "the kept spare node replaces it"
    assert why("abc", kept="ab", blamed="a") == "a failed before"


def test_a_host_is_blamed_where_avoided_ones_were_used_last(tmp_path: Path) -> None:
    launcher: Any = SimpleNamespace(hosts=lambda needed: tuple("abcd"))
    nodes = Nodes(tmp_path / "nodes.jsonl", launcher, 2, lambda: NOW)
    assert nodes.used(["a"], ["b"]) == ["c", "d"]
    assert nodes.used(["a", "c"], ["b"]) == ["d", "b"], "an avoided one, if there are no others"
