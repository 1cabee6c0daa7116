"""What ``amended`` events change about the data of a run that goes on. Pure: events in, values out.

Such an event is ``{"key", "value", "by", "why"}``. Keys: ``data.skip_steps`` (value: a list of batches to leave out, as
in the configuration) and ``data.fingerprint`` (value: that of the corpus to go on with).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from conf.schema import Config
from hlatctl.run.errors import ConfigError, DataError
from hlatctl.run.journal import Event

AMENDED = "amended"
TRAIN_STARTED = "train_started"
SKIP_STEPS = "data.skip_steps"
FINGERPRINT = "data.fingerprint"
#: More than this is no batch left out but another run.
_MAX_RANGE = 1_000_000


def batch_numbers(entries: Iterable[int | str]) -> frozenset[int]:
    """The numbers that entries such as ``7``, ``"9"`` and ``"120-125"`` name.

    Raises:
        ConfigError: an entry is neither a number from 1 on nor a range of such.
    """
    numbers: set[int] = set()
    for entry in entries:
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", str(entry))
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last < first + _MAX_RANGE:
            raise ConfigError(
                f"data.skip_steps={entry!r}: is neither a number from 1 on nor a range of them",
                hint='write data.skip_steps=[7,"120-125"]',
            )
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


def skipped_batches(config: Config, events: Iterable[Event]) -> frozenset[int]:
    """The batches that a run leaves out: 1-based numbers in the order without omissions.

    Args:
        config: of the run.
        events: of its journal; those that count, for a look at the past.
    """
    return batch_numbers([*config.data.skip_steps, *amended_skips(events)])


def amended_skips(events: Iterable[Event]) -> list[int | str]:
    """What ``amended`` events leave out, as it stands there, or in the ``train_started`` of an attempt that did so.

    The latter lies in another file: damage to one of the two brings nothing back that was left out.
    """
    lists = (
        event.get("amended_skips", []) if event["kind"] == TRAIN_STARTED else event["value"]
        for event in events
        if event["kind"] == TRAIN_STARTED or _amends(event, SKIP_STEPS)
    )
    flat = (entry for entries in lists for entry in (entries if isinstance(entries, list) else [entries]))
    return list(dict.fromkeys(entry if isinstance(entry, int | str) else str(entry) for entry in flat))


def _amends(event: Event, key: str) -> bool:
    return event["kind"] == AMENDED and event.get("key") == key


def batch_after(batch: int, steps: int, skipped: frozenset[int]) -> int:
    """Return the number of the batch that is trained on ``steps`` steps after batch number ``batch``."""
    if steps == 0:
        return batch
    number = batch + steps
    for skip in sorted(skipped):
        number += batch < skip <= number
    return number


def check_same_corpus(stored: str | None, dataset: Mapping[str, Any], events: Iterable[Event]) -> None:
    """Refuse to go on with another corpus than a run was trained on, unless that was amended.

    Args:
        stored: the fingerprint that the run has so far; None if it has none yet.
        dataset: ``dataset.json`` that it would go on with.
        events: of its journal.

    Raises:
        DataError: the corpus is another, and the newest amendment does not name it.
    """
    accepted = [event["value"] for event in events if _amends(event, FINGERPRINT)]
    if stored in (None, dataset["fingerprint"]) or accepted[-1:] == [dataset["fingerprint"]]:
        return
    raise DataError(
        f"data: the corpus has changed since the run began (fingerprint {dataset['fingerprint']}, was {stored})",
        hint="bring the files back as they were, or go on with the new ones: `hlatctl data accept RUN`",
    )
