"""`hlatctl checkpoint`: lists, verifies, restores, merges, exports and imports checkpoints."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hlatctl.cli.app import App
from hlatctl.cli.common import (
    Json,
    RunName,
    RunsDir,
    announce,
    columns,
    find_run,
    place,
    print_json,
    runs_folder,
    say,
    write,
)
from hlatctl.run.checkpoint import MANIFEST, folder_steps, read_manifest, why_invalid
from hlatctl.run.errors import CheckpointError, ConfigError
from hlatctl.run.fold import read_state
from hlatctl.run.paths import RunPaths
from hlatctl.units import count, size, utc

if TYPE_CHECKING:
    from conf.schema import Config

app = App("List, verify, merge, export and import checkpoints.")

_HEADER = ["STEP", "TOKENS", "SIZE", "WRITTEN", "WRITTEN BY", "KEPT AS", "STATE"]
Target = Annotated[Path, typer.Option("--to", help="Folder to create; it must be empty if it exists.", parser=place)]


class Format(StrEnum):
    """Layout of an exported model."""

    HUGGING_FACE = "hf"
    MEGATRON = "megatron"


class Dtype(StrEnum):
    """Number format of exported weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@app.command("ls")
def list_checkpoints(run: RunName, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """List a run's checkpoints and their states.

    Checks the names and sizes of their files. `hlatctl checkpoint verify` also reads them.
    """
    from conf.of_run import of_run

    paths = find_run(run, runs_dir)
    announce(paths)
    records = checkpoint_records(paths, of_run(paths))
    if as_json:
        print_json(records)
    elif records:
        write(columns([_HEADER, *(_row(record) for record in records)]))
    else:
        say(f"run {paths.run_id} has no checkpoints")


@app.command("verify")
def verify(
    run: RunName,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint to verify.  [default: all]")] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Verify the checksum of every file in a run's checkpoints."""
    paths = find_run(run, runs_dir)
    announce(paths)
    steps = folder_steps(paths)
    wanted = steps if step is None else [each for each in steps if each == step]
    if not wanted:
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        there = f"steps with a checkpoint: {', '.join(map(str, steps)) or 'none'}"
        raise CheckpointError(f"run {paths.run_id}: {what}", hint=there)
    invalid = 0
    for each in wanted:
        reason = why_invalid(paths.checkpoint(each))
        invalid += reason is not None
        write(f"step {each}: {reason or _whole(paths.checkpoint(each))}")
    if invalid:
        raise CheckpointError(
            f"run {paths.run_id}: {invalid} of {len(wanted)} checkpoints are damaged or incomplete",
            hint="training resumes from the newest valid one; restore the others from a copy, or delete them",
        )


@app.command("export")
def export(
    run: RunName,
    to: Target,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint.  [default: the newest valid one]")] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Number format of the weights.  [default: the checkpoint's]")
    ] = None,
    layout: Annotated[Format, typer.Option("--format", help="Format of the exported model.")] = Format.HUGGING_FACE,
    ema: Annotated[
        bool, typer.Option("--ema", help="Export the average of the weights, which optimizer.ema_decay keeps.")
    ] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Export a checkpoint and its tokenizer to Hugging Face format, or as a release that Megatron-LM loads.

    Megatron's format (torch_dist) has dense Llama and Qwen 3 models. With tracking.register_model=NAME in the run's
    configuration, an export to Hugging Face format becomes a version of that model in MLflow.
    """
    from conf.of_run import of_run
    from flows.runtime.programs import ask

    paths = find_run(run, runs_dir)
    chosen = ("--step", str(step)) if step is not None else ()
    number_format = ("--dtype", dtype.value) if dtype else ()
    format_of = ("--format", layout.value) if layout is not Format.HUGGING_FACE else ()
    averaged = ("--weights", "ema") if ema else ()
    argv = ("--run-dir", os.fspath(paths.root), "--to", os.fspath(to.absolute()), *format_of, *averaged)
    written = json.loads(ask("trainer.convert.export", *argv, *chosen, *number_format).splitlines()[-1])
    say(
        f"step {written['step']} of run {paths.run_id}: {count(written['parameters'])} parameters, "
        f"{written['dtype']}, {size(written['bytes'])}"
    )
    _warn_of_lost(written["left_out"])
    write(written["to"])
    if layout is Format.HUGGING_FACE and of_run(paths).tracking.register_model:
        from flows.tracking.mirrors import sync

        for registered in sync.register(paths, Path(written["to"]), written):
            say(f"registered in {registered}")


@app.command("merge")
def merge(
    checkpoints: Annotated[
        list[str], typer.Argument(metavar="RUN[@STEP]", help="Checkpoints; without @STEP the run's newest valid one.")
    ],
    to: Target,
    weights: Annotated[
        str | None, typer.Option(help="Relative weight of each, such as 1,1,2.  [default: equal ones]")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Number format of the weights.  [default: the first checkpoint's]")
    ] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Average the weights of checkpoints of one run, or of its forks, into a Hugging Face folder.

    `hlatctl eval FOLDER` evaluates it, and `hlatctl checkpoint import FOLDER` makes it the beginning of a run.
    """
    from flows.runtime.programs import ask

    if len(checkpoints) < 2:
        raise ConfigError(
            f"RUN={checkpoints[0]}: merging needs at least 2 checkpoints",
            hint="hlatctl checkpoint merge RUN@900 RUN@1000",
        )
    argv: list[str] = []
    for name, weight in zip(checkpoints, _weights(weights, len(checkpoints)), strict=True):
        run, _, step = name.partition("@")
        if not re.fullmatch(r"\d{0,18}", step):
            raise ConfigError(
                f"{name}: {step} is not a step", hint=f"`hlatctl checkpoint ls {run}` lists a run's steps"
            )
        root = find_run(run, runs_dir).root
        argv += ("--source", os.fspath(root), step or "newest", weight)
    number_format = ("--dtype", dtype.value) if dtype else ()
    written = json.loads(
        ask("trainer.convert.merge", *argv, "--to", os.fspath(to.absolute()), *number_format).splitlines()[-1]
    )
    for source in written["sources"]:
        share = f"{100 * source['share']:.4g} %"
        say(f"{share}: step {source['step']} of run {source['run']}, {count(source['tokens'])} tokens")
    say(f"{count(written['parameters'])} parameters, {written['dtype']}, {size(written['bytes'])}")
    _warn_of_lost(written["left_out"])
    write(written["to"])


def _weights(text: str | None, number: int) -> list[str]:
    if text is None:
        return ["1"] * number
    named = [each.strip() for each in text.split(",")]
    if len(named) != number or not all(re.fullmatch(r"\d+(\.\d*)?|\.\d+", each) for each in named):
        raise ConfigError(
            f"--weights={text}: must be {number} numbers of at least 0, one for each checkpoint",
            hint=f"--weights={','.join(['1'] * number)}, or omit it for equal ones",
        )
    return named


def _warn_of_lost(names: list[str]) -> None:
    if names:
        say(
            f"warning: the exported model has no place for {len(names)} tensors, such as {names[0]}; without them "
            "its outputs differ from those in training"
        )


@app.command("restore")
def restore(
    url: Annotated[str, typer.Argument(metavar="URL", help="The run's remote folder: s3://bucket/folder/RUN.")],
    runs_dir: RunsDir = None,
) -> None:
    """Recreate the directory of a lost run from its remote folder in object storage.

    Creates the directory with the run's configuration, and prints the command that continues the run. The processes of
    training then fetch the newest checkpoint.
    """
    from flows.tidy import recreate

    run, newest = recreate(url, runs_folder(runs_dir), argv=sys.argv)
    say(f"run {run.run_id}: recreated in {run.root}; the newest checkpoint in the remote folder is of step {newest}")
    say(f"the configuration has paths of the other cluster; `hlatctl resume {run.run_id} data.path=FOLDER` changes one")
    write(shlex.join(["hlatctl", "resume", run.run_id, *(["--runs-dir", str(runs_dir)] if runs_dir else [])]))


@app.command("import")
def import_model(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="A Hugging Face model in safetensors, or a DCP checkpoint.", parser=place
        ),
    ],
    to: Target,
    backend: Annotated[str, typer.Option(help="Backend that trains it: backend.name.")] = "torch_native",
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Hugging Face config.json of a DCP checkpoint's model. Tokenizer files beside it are copied.",
            parser=place,
        ),
    ] = None,
) -> None:
    """Import a model to train from: of Hugging Face, Megatron-LM or Megatron-Bridge, or a plain DCP checkpoint.

    Hugging Face: LLaMA, Qwen 3 (also mixtures of experts), OLMo 2 or DeepSeek-V3. Megatron (torch_dist): dense Llama
    and Qwen 3. Other DCP checkpoints must have names of torchtitan or Hugging Face, and need --config. Mixtures of
    experts and DeepSeek-V3 train with backend torchtitan. Prints the command that trains from the import.
    """
    from conf.registries import BACKENDS
    from flows.runtime.programs import ask

    BACKENDS[backend]  # an unknown name is an error
    argv = ("--from", os.fspath(source.absolute()), "--to", os.fspath(to.absolute()), "--backend", backend)
    described = ("--config", os.fspath(config.absolute())) if config else ()
    written = json.loads(ask("trainer.convert.import_model", *argv, *described).splitlines()[-1])
    say(f"{count(written['parameters'])} parameters, {', '.join(written['dtypes'])}, in {written['to']}")
    if written["tokenizer"] is None:
        say("the model's folder has no tokenizer; set tokenizer.path= to one")
    say("to train from it, replace CORPUS with the path of your corpus:")
    write(_train_command(written))


def _row(record: dict[str, Any]) -> list[str]:
    milestone = record["milestone_tokens"]
    kept = [f"milestone {count(milestone)}"] if milestone else []
    kept += ["permanent"] if record["permanent"] else []
    kept += ["newest"] if record["newest"] else []
    problem = record["problem"]
    if record["world"] is None:
        return [str(record["step"]), "-", "-", "-", "-", ", ".join(kept) or "-", problem]
    return [
        str(record["step"]),
        count(record["tokens"]),
        size(record["bytes"]),
        utc(record["written_unix_s"]),
        ", ".join(f"{key} {value}" for key, value in record["world"].items()),
        ", ".join(kept) or "-",
        problem or record["trust"] or "ok",
    ]


def _whole(folder: Path) -> str:
    written = read_manifest(folder)
    return f"valid ({len(written.files)} files, {size(written.size_bytes)})"


def _train_command(written: dict[str, Any]) -> str:
    """Return the command that trains from an imported model, quoted for Hydra and the shell."""
    from conf.initial_weights import model_overrides

    paths = {"train.init_from": written["to"], "tokenizer.path": written["tokenizer"] or "TOKENIZER"}
    overrides = [f"{key}={_hydra_quoted(path)}" for key, path in paths.items()]
    overrides += [f"backend={written['backend']}"] if written["backend"] != "torch_native" else []
    return shlex.join(["hlatctl", "train", *overrides, *model_overrides(written["model"]), "data.path=CORPUS"])


def _hydra_quoted(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_./~+-]+", text):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def checkpoint_records(run: RunPaths, config: Config) -> list[dict[str, Any]]:
    """Return a record of each checkpoint folder of a run, in order of steps. File contents are not verified."""
    steps, trust = folder_steps(run), read_state(run).trust
    newest = steps[-config.checkpoint.keep :]
    return [
        {
            "step": step,
            "tokens": None,
            "bytes": None,
            "written_unix_s": None,
            "world": None,
            "format": None,
            "milestone_tokens": config.milestones.get(step),
            "permanent": config.is_permanent(step),
            "newest": step in newest,
            **_of_folder(run, step),
            "trust": trust.get(step),
        }
        for step in steps
    ]


def _of_folder(run: RunPaths, step: int) -> dict[str, Any]:
    folder = run.checkpoint(step)
    record: dict[str, Any] = {"problem": why_invalid(folder, checksums=False), "path": os.fspath(folder)}
    try:
        manifest = read_manifest(folder)
        written_unix_s = (folder / MANIFEST).stat().st_mtime
    except (CheckpointError, OSError) as error:
        return {**record, "problem": record["problem"] or str(error)}
    return {
        **record,
        "tokens": manifest.tokens,
        "world": manifest.world,
        "format": manifest.format,
        "bytes": manifest.size_bytes,
        "written_unix_s": written_unix_s,
    }
