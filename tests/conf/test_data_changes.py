"""What a run's journal changes about its data."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.data_changes import batch_after, batch_numbers, batches_after, check_same_corpus, ranges, skipped_batches
from conf.schema import Config, DataConfig
from hlatctl.run.errors import ConfigError, DataError


def _changed(key: str, value: Any) -> dict[str, Any]:
    return {"kind": "data_changed", "key": key, "value": value, "by": "someone", "why": ""}


def test_batches_are_named_one_by_one_or_as_ranges() -> None:
    assert batch_numbers([7, "9", "120-122", " 3 - 4 "]) == {3, 4, 7, 9, 120, 121, 122}
    assert batch_numbers([]) == frozenset()


@pytest.mark.parametrize("entry", [0, -1, "0-3", "5-4", "x", "", "1,2", "1-2-3", "1-99999999"])
def test_what_names_no_batch_is_refused(entry: int | str) -> None:
    with pytest.raises(ConfigError, match="must be a number from 1, or a range of such numbers") as caught:
        batch_numbers([entry])
    assert f"data.skip_steps={entry!r}" in caught.value.message


def test_configuration_and_amendments_add_up() -> None:
    config = Config(data=DataConfig(skip_steps=[2]))
    events = [
        _changed("data.skip_steps", [5]),
        {"kind": "step", "step": 3},
        _changed("data.skip_steps", ["7-8"]),
        _changed("data.fingerprint", "f"),
    ]
    assert skipped_batches(config, events) == {2, 5, 7, 8}
    assert skipped_batches(config, []) == {2}


@given(st.sets(st.integers(1, 30)), st.integers(0, 20), st.integers(0, 20))
def test_steps_go_through_the_batches_that_are_kept(skipped: set[int], batch: int, steps: int) -> None:
    kept = [number for number in range(batch + 1, 100) if number not in skipped]
    assert batch_after(batch, steps, frozenset(skipped)) == [batch, *kept][steps]


@given(st.sets(st.integers(1, 30)), st.integers(0, 20), st.lists(st.integers(1, 20), unique=True).map(sorted))
def test_several_steps_have_the_batches_that_each_has(skipped: set[int], batch: int, steps: list[int]) -> None:
    expected = [batch_after(batch, step, frozenset(skipped)) for step in steps]
    assert list(batches_after(batch, steps, frozenset(skipped))) == expected


@given(st.sets(st.integers(1, 30)))
def test_batches_are_written_as_ranges(numbers: set[int]) -> None:
    assert batch_numbers(ranges(sorted(numbers))) == numbers
    assert ranges([1, 2, 3, 7]) == ["1-3", 7]


def test_a_run_goes_on_with_its_corpus_or_with_one_that_was_accepted() -> None:
    new = {"fingerprint": "new"}
    check_same_corpus(None, new, [])
    check_same_corpus("new", new, [])
    check_same_corpus("old", new, [_changed("data.fingerprint", "new")])
    for events in (
        [],
        [_changed("data.fingerprint", "other")],
        [_changed("data.fingerprint", "new"), _changed("data.fingerprint", "old")],
    ):
        with pytest.raises(
            DataError, match=r"corpus has changed since the run started \(fingerprint new, was old\)"
        ) as e:
            check_same_corpus("old", new, events)
        assert "hlatctl data accept RUN" in e.value.hint
