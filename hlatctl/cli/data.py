"""`hlatctl data`: shows a corpus and the documents of a step, changes the data of a run, and carries data elsewhere.

Trainer processes read the data (``flows.runtime.programs``), because this process doesn't import torch.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hlatctl.cli.app import App
from hlatctl.cli.common import (
    ConfigDirs,
    Json,
    Overrides,
    RunName,
    RunsDir,
    columns,
    find_run,
    place,
    print_json,
    say,
    with_runs_dir,
    write,
)
from hlatctl.report.run_view import is_simulated
from hlatctl.run.errors import DataError
from hlatctl.run.paths import RunPaths
from hlatctl.run.processes import user_name
from hlatctl.units import counted, size

if TYPE_CHECKING:
    from conf.schema import Config

_BAR = 40

app = App("Inspect, change and pack training data.")
Why = Annotated[str, typer.Option(help="Reason, recorded in the journal.")]


@app.command("inspect")
def inspect(
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    documents: Annotated[int, typer.Option(help="Documents per source whose tokens are counted.", min=1)] = 2000,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show the size of a corpus, and a sample of it.

    Shows documents, tokens, bytes, lengths and a packed sample. Prepares the corpus first if necessary.
    """
    from flows.runtime.programs import ask_about

    config, dataset = _prepared(with_runs_dir(overrides, runs_dir))
    argv = ("--dataset", os.fspath(dataset), "--documents", str(documents))
    survey = json.loads(ask_about("trainer.data.survey", config, *argv))
    if as_json:
        print_json(survey)
    else:
        write(_survey_text(survey))


@app.command("tokenize")
def tokenize(
    to: Annotated[Path, typer.Option(help="Folder to write. It appears when it is complete.", parser=place)],
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    processes: Annotated[int | None, typer.Option(help="Processes; by default one per core.", min=1)] = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Write a corpus as token ids, for training to read.

    Takes `data.path=` and `tokenizer.path=`. Without a tokenizer, trains one on the corpus. The folder can be the
    `data.path` of a run; its batches equal those of the text. After a stop, the same command continues.
    """
    from flows.runtime.programs import ask_about

    config, dataset = _prepared(with_runs_dir(overrides, runs_dir), to)
    argv = ["--dataset", os.fspath(dataset), "--to", os.fspath(to.absolute())]
    argv += ["--processes", str(processes)] if processes else []
    answer = json.loads(ask_about("trainer.data.tokenize", config, *argv, show_talk=True))
    if as_json:
        print_json(answer)
        return
    say(f"{to}: {answer['tokens']:,} tokens in {answer['documents']:,} documents, with the tokenizer")
    say(f"hlatctl train data.path={to}       trains on them")


@app.command("at")
def at(
    run: RunName,
    step: Annotated[int, typer.Option(help="Optimizer step, from 1.", min=1)],
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show the documents that a step of a run was trained on.

    Shows the file, the row and the beginning of the text of each.
    """
    from flows.runtime.programs import ask
    from hlatctl.run.checkpoint import checkpoint_steps

    paths = _find_trained(run, runs_dir)
    begin = max((s for s in checkpoint_steps(paths) if s < step), default=0)
    origin = f"the checkpoint of step {begin}" if begin else "the start, because no earlier checkpoint is left"
    say(f"step {step}: replaying {step - begin} batches from {origin}")
    answer = json.loads(ask("trainer.data.at", "--run-dir", os.fspath(paths.root), "--step", str(step)))
    if not answer["trained"]:
        say(f"step {step} is not trained yet, or must be redone after a restart; it will get these documents")
    if as_json:
        print_json(answer)
        return
    rows = [["sequence", "tokens", "from token", "file:row", "text"]]
    for index, documents in enumerate(answer["sequences"]):
        rows += [
            [str(index), str(d["tokens"]), str(d["first_token"]), f"{d['file']}:{d['row']}", json.dumps(d["text"])]
            for d in documents
        ]
    write(columns(rows))


@app.command("skip")
def skip(
    run: RunName,
    steps: Annotated[str, typer.Option(help="Steps whose batches are skipped, such as 120-125 or 7,9.")],
    why: Why = "",
    runs_dir: RunsDir = None,
) -> None:
    """Skip the batches of some steps in a run's next attempts."""
    from flows.data_changes import skip_steps

    paths = _find_trained(run, runs_dir)
    batches = skip_steps(paths, steps, by=user_name(), reason=why)
    say(f"{paths.run_id}: batches {', '.join(map(str, batches))} are skipped from its next attempt on")


@app.command("accept")
def accept(run: RunName, why: Why = "", runs_dir: RunsDir = None) -> None:
    """Accept a changed corpus, so that a run can continue with it."""
    from flows.data_changes import accept_corpus

    paths = _find_trained(run, runs_dir)
    before, accepted = accept_corpus(paths, by=user_name(), reason=why)
    if accepted == before:
        say(f"{paths.run_id}: the corpus has not changed")
        return
    say(f"{paths.run_id}: continues with corpus {accepted} (was {before})")
    say("a changed source has a new order: in its current epoch, some documents may be repeated or missed")


@app.command("needs")
def needs(
    overrides: Overrides = None, config_dir: ConfigDirs = None, as_json: Json = False, runs_dir: RunsDir = None
) -> None:
    """List the corpora, the tokenizer, the weights and the evaluation datasets of a configuration.

    Says for each whether it is on this machine, and how to get it where there is a network.
    """
    from conf.compose import compose
    from flows.data_archive import needs as needed

    found = needed(compose(with_runs_dir(overrides, runs_dir), to_start=False))
    if as_json:
        print_json([asdict(need) for need in found])
        return
    rows = [
        [
            need.key,
            need.path,
            need.state,
            f"{need.files:,}" if need.files else "",
            size(need.bytes) if need.files else "",
        ]
        for need in found
    ]
    write(columns([["KEY", "WHAT", "STATE", "FILES", "SIZE"], *rows]))
    for key, fetch in dict.fromkeys((need.key, need.fetch) for need in found if need.fetch):
        say(f"{key}: {fetch}")


@app.command("pack")
def pack(
    to: Annotated[Path, typer.Option(help="Archive to write, such as data.tar.", metavar="FILE", parser=place)],
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Write the data that a configuration reads into one archive.

    `hlatctl data unpack` verifies it where there is no network. Corpora in object storage are not packed.
    """
    from conf.compose import compose
    from flows.data_archive import pack as packed

    done = packed(compose(with_runs_dir(overrides, runs_dir), to_start=False), to.absolute())
    if as_json:
        print_json({"archive": os.fspath(to), **done})
        return
    say(f"{counted(done['files'], 'file')}, {size(done['bytes'])}, SHA-256 {done['sha256']}")
    write(to)


@app.command("unpack")
def unpack(
    archive: Annotated[Path, typer.Argument(metavar="FILE", help="Archive of `hlatctl data pack`.", parser=place)],
    to: Annotated[Path, typer.Option(help="Folder to create.", metavar="DIR", parser=place)],
    as_json: Json = False,
) -> None:
    """Unpack and verify an archive of data, and print the overrides that use it.

    The folder appears when every checksum agrees.
    """
    from flows.data_archive import unpack as unpacked

    overrides = unpacked(archive, to)
    if as_json:
        print_json(overrides)
        return
    say(f"{to}: verified; add these to `hlatctl plan` and `hlatctl train`")
    for override in overrides:
        write(shlex.quote(override))


def _prepared(overrides: list[str], target: Path | None = None) -> tuple[Config, Path]:
    """Return a checked configuration, and the ``dataset.json`` of its corpus, which is prepared if necessary."""
    from conf.compose import compose
    from flows.runtime.programs import ask_about
    from flows.stages.data import prepared_folder
    from flows.stages.validate import check

    config = compose(overrides)
    for source in config.data.inputs if target else ():
        if target and target.absolute().resolve().is_relative_to(Path(source.path).resolve()):
            raise DataError(f"--to={target}: is inside data.path={source.path}", hint="name a folder outside of it")
    check(config)
    folder = prepared_folder(config)
    if not (folder / "dataset.json").is_file():
        say(f"preparing {folder}")
        ask_about("trainer.data.prepare", config, "--to", os.fspath(folder), show_talk=True)
    return config, folder / "dataset.json"


def _find_trained(name: str, runs_dir: Path | None) -> RunPaths:
    paths = find_run(name, runs_dir)
    if is_simulated(paths):
        raise DataError(
            f"run {paths.run_id}: is simulated, so it has no corpus",
            hint="choose a run that is not simulated; `hlatctl runs` marks simulated ones",
        )
    return paths


def _survey_text(survey: dict[str, Any]) -> str:
    about = [
        f"fingerprint {survey['fingerprint']}, vocabulary {survey['vocab_size']:,}",
        f"{survey['documents']:,} documents for training, {survey['validation_documents']:,} held out; "
        f"{survey['tokens']:,} tokens, {_bytes(survey)}",
        f"skipped: {survey['skipped_rows']:,} rows without text, {survey['corrupt_count']:,} damaged rows or stretches",
        *(f"  {message}" for message in survey["corrupt"]),
        *(f"warning: {message}" for message in survey["warnings"]),
    ]
    parts = [line for source in survey["sources"] for line in _source_text(source)]
    return "\n".join([*about, *parts, "", "the beginning of the first packed sequence:", survey["sample"]])


def _bytes(survey: dict[str, Any]) -> str:
    """Return the size of the text; Megatron's files don't say it."""
    return "unknown bytes of text" if survey["text_bytes"] is None else f"{survey['text_bytes']:,} bytes"


def _source_text(source: dict[str, Any]) -> list[str]:
    measured = source["measured_documents"]
    estimated = "" if measured == source["documents"] else f" (estimated from {measured:,} documents)"
    histogram = source["length_histogram"]
    most = max(histogram.values())
    bars = [[f"< {int(limit):,}", f"{n:,}", "#" * -(-n * _BAR // most)] for limit, n in histogram.items()]
    return [
        "",
        f"{source['path']}: {source['weight']:.1%} of the tokens trained on",
        f"{source['documents']:,} documents of {source['rows']:,} rows, {source['tokens']:,} tokens{estimated}, "
        f"{_bytes(source)}",
        columns([["tokens", "documents", ""], *bars]),
    ]
