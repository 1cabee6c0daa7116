"""`hlatctl generate`: continues prompts with a run's checkpoint or a model. A process with torch does the work.

A model's text can contain anything, so the terminal only gets printable characters, newlines and tabs.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.devices import DEVICES
from conf.sampling import SEEDS, Sampling
from hlatctl.cli.common import Json, RunsDir, announce, place, print_json, run_names, runs_folder, say, write
from hlatctl.run import continuations
from hlatctl.run.errors import ConfigError, HlatctlError, StorageError
from hlatctl.run.fold import read_state
from hlatctl.run.paths import RunPaths
from hlatctl.units import printable

if TYPE_CHECKING:
    from flows.generate import Model

_DEVICES = ", ".join(DEVICES)
_QUIT = "/quit"
_WELCOME = (
    "This model continues texts: it was not trained to answer. Type the beginning of a text. "
    f"Ctrl-C ends a continuation, Ctrl-D or {_QUIT} ends the command."
)
_WHY = {
    "end_of_document": "end of document",
    "max_new_tokens": "--max-new-tokens",
    "context_full": "the context is full",
    "stopped": "stopped",
}


def generate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="Run, checkpoint folder, or Hugging Face model folder.", autocompletion=run_names
        ),
    ],
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Text to continue; can be repeated.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=place,
            help='File with one prompt per line; if it ends with .jsonl, lines are {"prompt": TEXT}.',
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Step of the run's checkpoint.  [default: the newest valid one]")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens to generate.")] = Sampling.max_new_tokens,
    temperature: Annotated[
        float, typer.Option(help="Divides the logits; 0 always takes the likeliest token.")
    ] = Sampling.temperature,
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest tokens that together have this probability.")
    ] = Sampling.top_p,
    top_k: Annotated[
        int, typer.Option(help="Draw from this many of the likeliest tokens; 0: from all.")
    ] = Sampling.top_k,
    seed: Annotated[int | None, typer.Option(help="Random seed for sampling.  [default: random]")] = None,
    device: Annotated[
        str | None, typer.Option(help=f"{_DEVICES}.  [default: the run's, or cpu while it trains]")
    ] = None,
    history: Annotated[
        bool, typer.Option("--history", help="Print how each milestone of a run continued the prompts of eval.prompts.")
    ] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Continue a text with a checkpoint or a model.

    Prints each prompt with its continuation, while it is generated. Without a prompt, asks for prompts in a terminal,
    or reads one from stdin. --json prints the exact texts and the token ids, at the end.
    """
    from flows import targets

    resolved = targets.find(target, runs_folder(runs_dir))
    if history:
        _print_history(resolved, as_json=as_json)
        return
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=secrets.randbelow(SEEDS) if seed is None else seed,
    )
    given = _prompts(prompt or [], prompts)
    is_asking = not given and sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    if not given and not is_asking:
        given = [_from_stdin()]
    with _opened(resolved, step=step, device=device) as model:
        if is_asking:
            _ask(model, sampling)
        elif as_json:
            _print_json(model, given, sampling)
        else:
            for each in given:
                _print_text(model, each, sampling, echo=True)


@contextmanager
def _opened(target: Any, *, step: int | None, device: str | None) -> Iterator[Model]:
    from conf.devices import DEVICES
    from flows import generate as flow

    if device is not None and device not in DEVICES:
        raise ConfigError(f"--device={device}: unknown", hint=f"use one of {', '.join(DEVICES)}")
    source = flow.source_of(target, step=step, device=device)
    with (
        _handled(_end, signal.SIGTERM, signal.SIGHUP),
        flow.opened(source, needs_device=device is not None, say=say) as model,
    ):
        facts = model.facts
        say(f"ready on {facts['device']}: context of {facts['context_tokens']:,} tokens")
        yield model


def _prompts(given: list[str], file: Path | None) -> list[str]:
    for text in given:
        _check(text, "--prompt")
    if file is None:
        return given
    try:
        lines = file.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except OSError as error:
        raise StorageError(f"--prompts={file}: can't be read ({error.strerror})", hint="name a text file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--prompts={file}: byte {error.start} is not UTF-8",
            hint=f"iconv -t UTF-8 converts it: iconv -f LATIN1 {file}",
        ) from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts={file}: has no prompt", hint="write one prompt per line")
    is_json = file.suffix == ".jsonl"
    return given + [_of_json(file, number, line) if is_json else line for number, line in numbered]


def _of_json(file: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["prompt"]
    except (ValueError, LookupError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str):
        raise ConfigError(
            f'--prompts={file}: line {number} is not a JSON object with a text "prompt"',
            hint='write {"prompt": "Once upon a time"}; a file with another ending has one prompt per line',
        )
    _check(text, f"--prompts={file}: line {number}")
    return text


def _from_stdin() -> str:
    """Return the prompt from a pipe, without its last newline."""
    hint = "give a prompt: --prompt TEXT"
    if sys.stdin.isatty():
        raise ConfigError("--prompt: is needed, because stdout is not a terminal or --json was given", hint=hint)
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin: byte {error.start} is not UTF-8", hint="iconv -t UTF-8 converts a text") from None
    if not text.strip():
        raise ConfigError("stdin: has no prompt", hint=hint)
    return text.removesuffix("\n")


def _check(text: str, name: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{name}: is not valid UTF-8", hint="iconv -t UTF-8 converts a text") from None


def _print_text(model: Model, prompt: str, sampling: Sampling, *, echo: bool) -> None:
    write(printable(prompt) if echo else "", nl=False)
    end = model.generate(prompt, sampling, lambda piece: write(printable(piece), nl=False))
    write()
    tokens = len(end["token_ids"])
    say(f"[{tokens} tokens, {tokens / max(end['wall_s'], 1e-3):.0f} tokens/s: {_WHY[end['stop']]}]")


def _print_json(model: Model, prompts: list[str], sampling: Sampling) -> None:
    texts = [{"prompt": prompt, **model.generate(prompt, sampling, lambda piece: None)} for prompt in prompts]
    print_json({**model.facts, "sampling": dataclasses.asdict(sampling), "texts": texts})


def _ask(model: Model, sampling: Sampling) -> None:
    import readline  # noqa: F401 - input() then has a history

    say(_WELCOME)
    while True:
        try:
            prompt = input("> ")
        except (EOFError, KeyboardInterrupt):
            say()
            return
        except UnicodeDecodeError:
            say("the line is not valid UTF-8")
            continue
        if prompt.strip() == _QUIT:
            return
        if not prompt:
            continue
        try:
            _check(prompt, "prompt")
            with _stopping(model):
                _print_text(model, prompt, sampling, echo=False)
        except HlatctlError as error:
            if not model.is_running:
                raise
            say(f"{error.word}: {printable(str(error))}")
        sampling = dataclasses.replace(sampling, seed=(sampling.seed + 1) % SEEDS)


@contextmanager
def _stopping(model: Model) -> Iterator[None]:
    """End the text at the first Ctrl-C, and the command at the second."""
    asked = False

    def stop(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        model.stop()

    with _handled(stop, signal.SIGINT):
        yield


def _end(number: int, frame: Any) -> None:
    """End the command like an exception does, so that the exported model is removed. A signal handler."""
    raise SystemExit(128 + number)


@contextmanager
def _handled(handler: Callable[[int, Any], None], *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals in the block, except those that are ignored, as `nohup` does."""
    before = {number: signal.getsignal(number) for number in numbers}
    for number, old in before.items():
        if old is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _print_history(target: Any, *, as_json: bool) -> None:
    from flows.targets import RunTarget
    from hlatctl.report.appendix import by_prompt

    if not isinstance(target, RunTarget) or target.step is not None:
        raise ConfigError("--history: shows the milestones of a run, but TARGET is a single model", hint="name a run")
    run: RunPaths = target.run
    announce(run)
    kept = continuations.history(run, read_state(run).milestones)
    if as_json:
        print_json([dataclasses.asdict(each) for each in kept])
    elif not kept:
        say(f"run {run.run_id} has no continuations: its milestones are not evaluated yet, or eval.prompts is empty")
    for prompt, rows in [] if as_json else by_prompt(kept):
        write(f"=== {prompt}")
        for tokens, text in rows:
            write(f"--- {tokens} tokens\n{text}")
