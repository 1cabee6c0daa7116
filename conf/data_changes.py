"""Changes of a run's data after it was created, from the ``data_changed`` events of its journal.

Such an event is ``{"key", "value", "by", "why"}``. Its key is ``data.skip_steps`` (value: a list of batches to skip, as
in the configuration) or ``data.fingerprint`` (value: the fingerprint of the corpus to continue with).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from conf.schema import Config
from hlatctl.run.errors import ConfigError, DataError
from hlatctl.run.journal import Event

DATA_CHANGED = "data_changed"
TRAIN_STARTED = "train_started"
SKIP_STEPS = "data.skip_steps"
FINGERPRINT = "data.fingerprint"
#: The largest range of batches to skip.
_MAX_RANGE = 1_000_000


def batch_numbers(
    entries: Iterable[int | str], key: str = SKIP_STEPS, hint: str = 'write data.skip_steps=[7,"120-125"]'
) -> frozenset[int]:
    """Return the numbers in entries such as ``7``, ``"9"`` and ``"120-125"``.

    Args:
        key: what has the entries, for an error.
        hint: of this error.

    Raises:
        ConfigError: an entry is neither a number from 1 nor a range of such numbers.
    """
    numbers: set[int] = set()
    for entry in entries:
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", str(entry))
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last < first + _MAX_RANGE:
            raise ConfigError(
                f"{key}={entry!r}: must be a number from 1, or a range of such numbers, at most {_MAX_RANGE:,} of them",
                hint=hint,
            )
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def skipped_batches(config: Config, events: Iterable[Event]) -> frozenset[int]:
    """Return the batches that a run skips: 1-based numbers in the order without skips.

    Args:
        events: events of the run's journal; for an earlier state, those up to it.
    """
    return batch_numbers([*config.data.skip_steps, *added_skips(events)])


def added_skips(events: Iterable[Event]) -> list[int | str]:
    """Return the entries of ``data_changed`` events and of the ``train_started`` events that repeat them.

    The two kinds are in different files, so skipped batches stay skipped if one of the files is damaged.
    """
    lists = (
        event.get("added_skips", []) if event["kind"] == TRAIN_STARTED else event["value"]
        for event in events
        if event["kind"] == TRAIN_STARTED or _is_of(event, SKIP_STEPS)
    )
    flat = (entry for entries in lists for entry in (entries if isinstance(entries, list) else [entries]))
    return list(dict.fromkeys(entry if isinstance(entry, int | str) else str(entry) for entry in flat))


def _is_of(event: Event, key: str) -> bool:
    return event["kind"] == DATA_CHANGED and event.get("key") == key


def ranges(numbers: Iterable[int]) -> list[int | str]:
    """Return entries for ascending numbers, such as ``["1-3", 7]`` for 1, 2, 3 and 7."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return [first if first == last else f"{first}-{last}" for first, last in found]


def batch_after(batch: int, steps: int, skipped: frozenset[int]) -> int:
    """Return the number of the batch trained on ``steps`` steps after another; skipped batches don't count."""
    return next(batches_after(batch, [steps], skipped)) if steps else batch


def batches_after(batch: int, steps: Iterable[int], skipped: frozenset[int]) -> Iterator[int]:
    """Yield the same for ascending numbers of steps, each at least 1."""
    skips = sorted(skip for skip in skipped if skip > batch)
    passed = 0
    for step in steps:
        while passed < len(skips) and skips[passed] <= batch + step + passed:
            passed += 1
        yield batch + step + passed


def check_same_corpus(stored: str | None, dataset: Mapping[str, Any], events: Iterable[Event]) -> None:
    """Refuse to continue a run with a changed corpus that no change of data accepts.

    Args:
        stored: the run's fingerprint; None if it has none yet.
        dataset: ``dataset.json`` to continue with.

    Raises:
        DataError: the corpus has changed, and the newest change of data does not name it.
    """
    accepted = [event["value"] for event in events if _is_of(event, FINGERPRINT)]
    if stored in (None, dataset["fingerprint"]) or accepted[-1:] == [dataset["fingerprint"]]:
        return
    raise DataError(
        f"data: the corpus has changed since the run started (fingerprint {dataset['fingerprint']}, was {stored})",
        hint="restore the files, or continue with the new ones: `hlatctl data accept RUN`",
    )
