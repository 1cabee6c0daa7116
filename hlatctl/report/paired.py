"""Compare two evaluations item by item.

Two models that answer the same questions have correlated errors, so the difference of their scores is known better than
each score. Only the questions on which they differ count: McNemar's exact test for right and wrong answers (McNemar
1947), a permutation test of signs for other values and for means over tasks. The interval is a percentile bootstrap
over the items of each task. Holm's correction (Holm 1979) keeps the chance of one false discovery over all rows below
:data:`LEVEL`. A group's row is computed like the group's score: a mean over all items, or the mean of its tasks' means.

Items are paired by document and right answer. Prompts and other conditions may differ: the pairs still answer the same
questions, but then the conditions contribute to the difference. Each row says so, from comparing the contracts of each
task field by field.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hlatctl.report import items
from hlatctl.report.compare import Measured, RunScores, read_scores
from hlatctl.report.contracts import Conditions
from hlatctl.report.items import Item, TaskItems
from hlatctl.report.tabular import aligned
from hlatctl.run import contract
from hlatctl.run.paths import RunPaths
from hlatctl.run.state import MilestoneState
from hlatctl.units import counted, printable

EQUAL, DIFFERENT, UNKNOWN = "equal", "different", "unknown"
#: Conditions that two evaluations by others may name.
_CONDITIONS = ("shots", "limit", "definition")


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """How the contracts of two evaluations differ.

    Args:
        status: ``equal``, ``different``, or ``unknown`` if one isn't recorded and no difference is known.
        differences: both values as text, by field name. A model's files don't count as a difference.
    """

    status: str = UNKNOWN
    differences: dict[str, tuple[str, str]] = field(default_factory=dict)


def contrast(first: RunScores, second: RunScores, task: str) -> Contrast:
    """Return how the contracts of a task differ between two evaluations."""
    one, other = _score(first, task), _score(second, task)
    if one is None or other is None:
        return Contrast()
    if one.known.key and one.known.key == other.known.key:
        return Contrast(status=EQUAL)
    if one.known.fields and other.known.fields:
        found = {name: (a, b) for name, a, b in contract.differences(one.known.fields, other.known.fields)}
    else:
        found = _of_conditions(one.known.conditions, other.known.conditions)
    return Contrast(status=DIFFERENT if found else UNKNOWN, differences=found)


def together(parts: Iterable[Contrast]) -> Contrast:
    """Return how the contracts of a group's tasks differ; a field that differs in several has its first values."""
    every, found = list(parts), dict[str, tuple[str, str]]()
    for part in every:
        found = {**part.differences, **found}
    if found:
        return Contrast(status=DIFFERENT, differences=found)
    return Contrast(status=EQUAL if every and all(part.status == EQUAL for part in every) else UNKNOWN)


def _score(run: RunScores, task: str) -> Measured | None:
    names = (name for name in run.scores if name == task or name.startswith(f"{task}_pass_at_"))
    return run.scores.get(min(names, key=len, default=task))


def _of_conditions(one: Conditions, other: Conditions) -> dict[str, tuple[str, str]]:
    values = {name: (getattr(one, name), getattr(other, name)) for name in _CONDITIONS}
    return {name: (str(a), str(b)) for name, (a, b) in values.items() if None not in (a, b) and a != b}


#: Probability of one false discovery over all rows.
LEVEL = 0.05
_RESAMPLES = 2_000
#: Factor of a bound: 1 / (4 x probability that a standard normal value is at least the square root of 2).
_TAIL_FACTOR = 1 / (2 * math.erfc(1.0))
#: Values drawn together; bounds memory.
_BATCH_VALUES = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Flip:
    """An item on which the two differ."""

    first: Item
    second: Item


@dataclass(frozen=True, kw_only=True)
class PairedRow:
    """One task or group.

    Args:
        unpaired: number of questions that only one of them answered.
        reworded: number of questions that both answered after different prompts.
        contracts: whether both were measured under equal contracts, or what differs.
        tasks: number of tasks in an unweighted mean; 0: the row is the mean over ``items``.
        low, high: 95 % interval of ``second - first``.
        p, holm: probability of such a difference between equal models, for this row alone and corrected for all rows.
        gained, lost: number of items on which the second is better, and worse.
    """

    name: str
    metric: str
    items: int
    unpaired: int
    reworded: int
    contracts: Contrast
    tasks: int
    first: float
    second: float
    low: float
    high: float
    p: float
    holm: float
    gained: list[Flip]
    lost: list[Flip]

    @property
    def is_real(self) -> bool:
        """Whether the difference is statistically significant."""
        return self.holm < LEVEL


@dataclass(frozen=True, kw_only=True)
class Paired:
    """All rows, and the reason for each name without a row."""

    rows: list[PairedRow]
    left_out: dict[str, str]


def compare_items(
    first: Mapping[str, TaskItems],
    second: Mapping[str, TaskItems],
    groups: Mapping[str, Sequence[str]],
    contrasts: Mapping[str, Contrast],
    over_tasks: Collection[tuple[str, str]] = (),
    seed: int = 0,
) -> Paired:
    """Return the differences of two evaluations.

    Args:
        over_tasks: groups and metrics whose score is the unweighted mean over tasks.
    """
    rows, left_out = [], {}
    for name, tasks in groups.items():
        missing = [task for task in tasks if task not in first or task not in second]
        metrics = {side[task].metric for task in tasks for side in (first, second) if task in side}
        if missing:
            left_out[name] = f"only one of them has {'it' if missing == [name] else missing[0]}"
        elif len(metrics) > 1:
            left_out[name] = f"its metrics differ: {', '.join(sorted(metrics))}"
        elif any(side[task].items is None for task in tasks for side in (first, second)):
            left_out[name] = f"{metrics.pop()} is no finite number for each item"
        elif why := next(filter(None, (_why_unpaired(first[task], second[task]) for task in tasks)), ""):
            left_out[name] = why
        else:
            metric = metrics.pop()
            contracts = together(contrasts.get(task, Contrast()) for task in tasks)
            sides = [(first[task], second[task]) for task in tasks]
            rows.append(_row(name, metric, sides, contracts, seed, is_over_tasks=(name, metric) in over_tasks))
    return Paired(rows=_holm(rows), left_out=left_out)


Evaluated = tuple[RunPaths, MilestoneState]


def compare_milestones(first: Evaluated, second: Evaluated, warn: Callable[[str], None]) -> Paired:
    """Return the differences of two evaluated milestones from their files of items. Large suites take seconds.

    Args:
        warn: called with a message if a record of contracts is damaged.

    Raises:
        EvaluationError: a file of items is damaged.
    """
    old, new = (items.read_items(*side) for side in (first, second))
    before, after = (read_scores(run, at.milestone_tokens, warn) for run, at in (first, second))
    return compare_items(
        old,
        new,
        items.groups(first[0], old) | items.groups(second[0], new),
        {task: contrast(before, after, task) for task in old.keys() & new.keys()},
        items.means_over_tasks(first[0]) | items.means_over_tasks(second[0]),
    )


def _pairs(first: TaskItems, second: TaskItems) -> list[Flip]:
    old, new = _by_document(first.items or {}), _by_document(second.items or {})
    return [Flip(first=old[key], second=new[key]) for key in old if key in new]


def _by_document(items: Mapping[str, Item]) -> dict[tuple[str, int], Item]:
    seen: Counter[str] = Counter()
    found = {}
    for item in items.values():
        if item.document:
            seen[item.document] += 1
            found[item.document, seen[item.document]] = item
    return found


def _why_unpaired(first: TaskItems, second: TaskItems) -> str:
    """Return why a task has no pairs of items; empty if it has some. Imported items can lack their documents."""
    if _pairs(first, second):
        return ""
    sides = [(side.items or {}).values() for side in (first, second)]
    if any(items and not any(item.document for item in items) for items in sides):
        return "the imported items of one of them have no documents, so that none can be paired"
    return "no question has the same document and right answer in both"


def _row(
    name: str,
    metric: str,
    sides: Sequence[tuple[TaskItems, TaskItems]],
    contracts: Contrast,
    seed: int,
    *,
    is_over_tasks: bool,
) -> PairedRow:
    import numpy

    parts = [_pairs(*side) for side in sides]
    pairs = [pair for part in parts for pair in part]
    shares = [1 / len(parts) if is_over_tasks else len(part) / len(pairs) for part in parts]
    # An item's change counts as often as if all tasks had equally many items.
    weights = numpy.repeat(
        [share * len(pairs) / len(part) for share, part in zip(shares, parts, strict=True)],
        [len(part) for part in parts],
    )
    first = numpy.array([pair.first.value for pair in pairs])
    second = numpy.array([pair.second.value for pair in pairs])
    change = second - first
    by_task = numpy.split(change, numpy.cumsum([len(part) for part in parts])[:-1])
    low, high = _interval(by_task, shares, seed)
    is_counted = not is_over_tasks and set(change.tolist()) <= {-1.0, 0.0, 1.0}
    p = _mcnemar(change) if is_counted else _signs(weights * change, seed)
    return PairedRow(
        name=name,
        metric=metric,
        items=len(pairs),
        unpaired=sum(len(side.items or {}) for both in sides for side in both) - 2 * len(pairs),
        reworded=sum(pair.first.asked != pair.second.asked for pair in pairs),
        contracts=contracts,
        tasks=len(parts) if is_over_tasks else 0,
        first=float((weights * first).mean()),
        second=float((weights * second).mean()),
        low=low,
        high=high,
        p=p,
        holm=p,
        gained=[pair for pair, by in zip(pairs, change, strict=True) if by > 0],
        lost=[pair for pair, by in zip(pairs, change, strict=True) if by < 0],
    )


def _mcnemar(change: object) -> float:
    import numpy
    from scipy.stats import binomtest

    values = numpy.asarray(change)
    gained, lost = int((values > 0).sum()), int((values < 0).sum())
    return float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def _signs(change: object, seed: int) -> float:
    import numpy
    from scipy.stats import permutation_test

    values = numpy.asarray(change)
    if not values.any():
        return 1.0
    found = permutation_test(
        (values,),
        lambda x, axis: x.mean(axis=axis),
        permutation_type="samples",
        n_resamples=_RESAMPLES,
        batch=max(1, _BATCH_VALUES // values.size),
        vectorized=True,
        rng=numpy.random.default_rng(seed),
    )
    least = 2 / (_RESAMPLES + 1)
    return min(float(found.pvalue), _tail_bound(values)) if found.pvalue <= least else float(found.pvalue)


def _tail_bound(change: object) -> float:
    """Return an upper bound of a permutation test's chance, which is close to it where drawing finds no other value.

    2,000 draws give no chance below 0.001, which Holm's correction raises above :data:`LEVEL` from 51 rows on. More
    draws would be needed in proportion to the rows. Instead, the tail of a sum with random signs is at most 3.18 times
    that of a normal distribution with the same variance, for any values and any number of them (Bentkus and
    Dzindzalieta 2015, A tight Gaussian bound for weighted sums of Rademacher random variables). As a bound, it never
    makes a difference look more certain than the exact test does.
    """
    import numpy

    values = numpy.asarray(change)
    distance = abs(float(values.sum())) / math.sqrt(float((values**2).sum()))
    return _TAIL_FACTOR * math.erfc(distance / math.sqrt(2))


def _interval(by_task: Sequence[object], shares: Sequence[float], seed: int) -> tuple[float, float]:
    """Return the interval of a weighted sum of the tasks' means; items are drawn from each task."""
    import numpy

    means, rng = numpy.zeros(_RESAMPLES), numpy.random.default_rng(seed)
    for change, share in zip(by_task, shares, strict=True):
        values = numpy.asarray(change)
        batch = max(1, _BATCH_VALUES // values.size)
        for begin in range(0, _RESAMPLES, batch):
            drawn = rng.integers(0, values.size, (min(batch, _RESAMPLES - begin), values.size))
            means[begin : begin + batch] += share * values[drawn].mean(axis=1)
    low, high = numpy.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def _holm(rows: list[PairedRow]) -> list[PairedRow]:
    """Return the rows with corrected probabilities: the k-th smallest of n times n - k + 1, never decreasing."""
    corrected: dict[str, float] = {}
    least = 0.0
    for place, row in enumerate(sorted(rows, key=lambda row: row.p)):
        least = max(least, min(1.0, row.p * (len(rows) - place)))
        corrected[row.name] = least
    return [replace(row, holm=corrected[row.name]) for row in rows]


_HEAD = (
    "task",
    "metric",
    "contracts",
    "items",
    "first",
    "second",
    "difference",
    "95 % interval",
    "gained",
    "lost",
    "p",
    "p (Holm)",
)
_ANSWER_CHARS = 60
#: Fields of contracts that are named, and the longest of their values that are shown.
_MOST_FIELDS, _VALUE_CHARS = 4, 24


def text(paired: Paired, first: str, second: str, flips: int) -> str:
    """Return a table, conclusions, and up to ``flips`` items of each row on which the two differ.

    Control characters in tasks and answers are shown by their codes.
    """
    lines = [
        f"first: {first}",
        f"second: {second}",
        "",
        *aligned([_HEAD, *(_cells(row) for row in paired.rows)], left=3),
        "",
    ]
    lines += [_verdict(paired.rows), *map(_contracts, (row for row in paired.rows if _is_doubtful(row)))]
    lines += [
        f"{row.name} is the mean over its {counted(row.tasks, 'task')}, whatever their numbers of items"
        for row in paired.rows
        if row.tasks
    ]
    unpaired = sum(row.unpaired for row in paired.rows)
    if unpaired:
        lines.append(f"{unpaired:,} items are left out: only one of the two has them")
    lines += [f"{name} is left out: {why}" for name, why in paired.left_out.items()]
    for row in paired.rows:
        for title, found in (("gained", row.gained[:flips]), ("lost", row.lost[:flips])):
            lines += ["", f"{row.name}: {title}", *(_flip(flip) for flip in found)] if found else []
    return printable("\n".join(lines) + "\n")


def as_json(paired: Paired, first: str, second: str) -> dict[str, Any]:
    """Return all rows with all items on which the two differ."""
    return {
        "first": first,
        "second": second,
        "level": LEVEL,
        "rows": [
            {**asdict(row), "gained": [_pair(flip) for flip in row.gained], "lost": [_pair(flip) for flip in row.lost]}
            for row in paired.rows
        ],
        "left_out": paired.left_out,
    }


def _cells(row: PairedRow) -> tuple[str, ...]:
    change = row.second - row.first
    return (
        row.name,
        row.metric,
        row.contracts.status,
        f"{row.items:,}",
        f"{row.first:.4f}",
        f"{row.second:.4f}",
        f"{change:+.4f}",
        f"{row.low:+.4f} to {row.high:+.4f}",
        str(len(row.gained)),
        str(len(row.lost)),
        f"{row.p:.3f}",
        f"{row.holm:.3f}{' *' if row.is_real else ''}",
    )


def _verdict(rows: list[PairedRow]) -> str:
    real = [row.name for row in rows if row.is_real]
    if not real:
        return f"no difference is more than chance (p < {LEVEL} after Holm's correction for {len(rows)} rows)"
    return f"* more than chance (p < {LEVEL} after Holm's correction for {len(rows)} rows): {', '.join(real)}"


def _is_doubtful(row: PairedRow) -> bool:
    return row.contracts.status != EQUAL or row.reworded > 0


def _contracts(row: PairedRow) -> str:
    fields = row.contracts.differences
    named = [_field(name, *values) for name, values in list(fields.items())[:_MOST_FIELDS]]
    more = [f"{counted(len(fields) - _MOST_FIELDS, 'more field')}"] if len(fields) > _MOST_FIELDS else []
    prompts = [f"the prompts of {row.reworded:,} of {counted(row.items, 'item')}"] if row.reworded else []
    differs = "; ".join([*named, *more, *prompts])
    if differs:
        return f"{row.name}: not only the models differ, so the difference may come from this: {differs}"
    return f"{row.name}: a contract is not recorded, so it is unknown whether only the models differ"


def _field(name: str, first: str, second: str) -> str:
    return f"{name} ({first}, {second})" if max(len(first), len(second)) <= _VALUE_CHARS else name


def _flip(flip: Flip) -> str:
    target = f", right: {_cut(flip.first.target)}" if flip.first.target else ""
    return f"  {flip.first.task} {flip.first.name}{target}: {_short(flip.first)} -> {_short(flip.second)}"


def _short(item: Item) -> str:
    return f"{item.value:g}" + (f" ({_cut(item.answer)})" if item.answer else "")


def _cut(words: str) -> str:
    line = " ".join(words.split())
    return line if len(line) <= _ANSWER_CHARS else line[: _ANSWER_CHARS - 1] + "…"


def _pair(flip: Flip) -> dict[str, Any]:
    keys = {"task": flip.first.task, "name": flip.first.name, "target": flip.first.target}
    values = {"first": flip.first.value, "second": flip.second.value}
    return keys | values | {"first_answer": flip.first.answer, "second_answer": flip.second.answer}
