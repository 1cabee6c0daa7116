"""`hlatctl eval contamination`: finds evaluation items in the corpus that a run has read."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from hlatctl.cli.common import Json, Overrides, RunName, RunsDir, find_run, print_json, say, write
from hlatctl.run.fold import read_state
from hlatctl.units import count, duration

_MB = 1e6


def contamination(
    run: RunName,
    overrides: Overrides = None,
    at: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Milestone.  [default: the newest one]", show_default=False)
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes.  [default: one per core that memory has room for]", min=1, show_default=False),
    ] = None,
    shard: Annotated[str, typer.Option(metavar="I/N", help="Scan one of N parts, such as 3/8, on any node.")] = "1/1",
    plan: Annotated[bool, typer.Option("--plan", help="Scan one chunk, and estimate the time of the others.")] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Find evaluation items in the corpus that a run has read.

    Looks for n-grams of 8 to 13 words of each item, question and answer, in the documents that the run has read. Shows
    how many items overlap, and the scores without them. After a stop, the same command continues.

    OVERRIDES can change only eval.* keys, such as eval=hlat_core eval.data_dir=DIR.
    """
    from conf.compose import override_eval
    from conf.load import token_count
    from conf.of_run import of_run
    from flows import contamination as flow
    from hlatctl.report.contamination import items_of, overlap, read_overlaps, text, unscanned
    from hlatctl.report.corpus_scans import scanned

    tokens = token_count(at, "--at") if at is not None else None
    paths = find_run(run, runs_dir)
    state = read_state(paths)
    point = flow.upto(paths, state, tokens)
    config = override_eval(of_run(paths), overrides) if overrides else of_run(paths)
    if point.is_later:
        say(f"the milestone's checkpoint is gone; what was read up to step {point.step} is scanned")
    answer = flow.search(paths, config, point, workers=workers, shard=shard, chunks=1 if plan else None)
    scored = items_of(paths, state.milestones[point.milestone_tokens])
    tasks = scanned(answer["tasks"], point.milestone_tokens)
    rows = [overlap(name, task, scored.get(name)) for name, task in tasks.items()]
    known = read_overlaps(paths, state)
    missing = unscanned(paths, state, [*(known.rows if known else []), *rows])
    if as_json:
        means = {row.task: {key: asdict(row)[key] for key in ("metric", "everything", "clean")} for row in rows}
        more = {"milestone_tokens": point.milestone_tokens, "step": point.step, "means": means, "unscanned": missing}
        print_json({**answer, **more})
    else:
        write(text(rows), nl=False)
    say(_read(answer, count(point.milestone_tokens)))
    processes = answer["processes"]
    if missing:
        say(f"evaluated items that no scan has had: {', '.join(missing)}; name their suite, such as eval=hlat_core")
    if not answer["complete"]:
        say(_rest(answer, processes))
    if config.total_tokens > point.milestone_tokens > 0:
        say(_whole(answer, config.total_tokens / point.milestone_tokens, count(config.total_tokens), processes))


def _read(answer: dict[str, Any], tokens: str) -> str:
    read_bytes, cpu_s = answer["text_bytes"], answer["cpu_s"]
    speed = f", {read_bytes / cpu_s / _MB:,.1f} MB/s per process" if cpu_s else ""
    return (
        f"{answer['documents']:,} documents up to {tokens} tokens, {read_bytes / _MB:,.1f} MB of text{speed}; "
        f"{answer['ngrams']:,} n-grams"
    )


def _rest(answer: dict[str, Any], processes: int) -> str:
    """Return how much is not scanned yet, and the time that it takes at the speed so far."""
    left_bytes = max(0, answer["total_bytes"] - answer["text_bytes"])
    left = f"not complete: {left_bytes / _MB:,.1f} MB of text are left"
    if not answer["text_bytes"]:
        return f"{left}; run the command without --shard to finish"
    return f"{left}: {_times(left_bytes / answer['text_bytes'] * answer['cpu_s'], processes)}"


def _whole(answer: dict[str, Any], times: float, tokens: str, processes: int) -> str:
    """Return the time that a scan up to the end of the run takes, if its documents are like those so far.

    Args:
        times: tokens at the end of the run, as a multiple of those up to the milestone.
    """
    total_s = times * answer["total_bytes"] * answer["cpu_s"] / max(1, answer["text_bytes"])
    return f"up to the run's end at {tokens} tokens: {_times(total_s, processes)}"


def _times(one_s: float, processes: int) -> str:
    return f"{duration(one_s)} of one process, {duration(one_s / processes)} of {processes}"
