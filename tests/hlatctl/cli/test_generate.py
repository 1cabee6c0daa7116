"""`hlatctl generate`: its prompts, what reaches the terminal, and the texts of milestones."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conf.sampling import Sampling
from flows import generate as flow
from hlatctl.cli.main import main
from hlatctl.cli.status import end_lines
from hlatctl.report.run_view import view_run
from hlatctl.run import continuations
from hlatctl.run.errors import EvaluationError
from hlatctl.run.fold import read_state
from tests.hlatctl.conftest import MakeRun

_FACTS = {"model": "/hf", "device": "cpu", "parameters": 1, "context_tokens": 8}
_HOSTILE = "\x1b]0;title\x07a\tb\r\n\u202ec é"


class _Model:
    """Answers every prompt with a hostile text, or refuses it."""

    facts = _FACTS
    is_running = True

    def __init__(self) -> None:
        self.is_closed = False
        self.asked: list[tuple[str, Sampling]] = []
        self.stops = 0

    def generate(self, prompt: str, sampling: Sampling, write: Callable[[str], None]) -> dict[str, Any]:
        self.asked.append((prompt, sampling))
        if prompt == "long":
            raise EvaluationError("prompt: has 9 tokens", hint="shorten the prompt")
        if prompt in ("SIGINT", "SIGTERM"):
            os.kill(os.getpid(), signal.Signals[prompt])
        for piece in _HOSTILE:
            write(piece)
        return {"text": _HOSTILE, "token_ids": [1, 2], "prompt_tokens": 3, "stop": "max_new_tokens", "wall_s": 0.5}

    def stop(self) -> None:
        self.stops += 1


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> _Model:
    """Stands for the process with the model."""
    made = _Model()

    @contextmanager
    def opened(*arguments: Any, **keys: Any) -> Iterator[_Model]:
        try:
            yield made
        finally:
            made.is_closed = True

    monkeypatch.setattr(flow, "opened", opened)
    return made


@pytest.fixture
def hf(tmp_path: Path) -> str:
    folder = tmp_path / "hf"
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).write_text("{}", encoding="utf-8")
    return os.fspath(folder)


def _pipe(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_control_characters_of_a_text_do_not_reach_the_terminal(
    model: _Model, hf: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", hf, "--prompt", "one\x1b[2J", "--seed", "7"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "one\\x1b[2J\\x1b]0;title\\x07a\tb\\r\n\\u202ec é\n"
    assert captured.err.splitlines()[-1] == "[2 tokens, 4 tokens/s: --max-new-tokens]"
    assert model.asked == [("one\x1b[2J", Sampling(seed=7))]


def test_json_has_the_exact_text(model: _Model, hf: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--temperature=0", "--top-k=4", "--top-p=0.5", "--max-new-tokens=9", "--seed=3", "--json"]
    assert main(["generate", hf, "--prompt", "a", "--prompt", "b", *options]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(text["prompt"], text["text"]) for text in record["texts"]] == [("a", _HOSTILE), ("b", _HOSTILE)]
    assert record["sampling"] == {"max_new_tokens": 9, "temperature": 0, "top_p": 0.5, "top_k": 4, "seed": 3}
    assert record["model"] == "/hf"


def test_prompts_come_from_files_and_from_a_pipe(
    model: _Model, hf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain.txt").write_bytes("\ufeffone\r\n\n two\u2028\n".encode())
    (tmp_path / "lines.jsonl").write_text('{"prompt": "a\\nb"}\n', encoding="utf-8")
    assert main(["generate", hf, "--prompts", str(tmp_path / "plain.txt"), "--prompt", "zero"]) == 0
    assert main(["generate", hf, "--prompts", str(tmp_path / "lines.jsonl")]) == 0
    _pipe(monkeypatch, "piped\né\n\n".encode())
    assert main(["generate", hf]) == 0
    assert [prompt for prompt, _ in model.asked] == ["zero", "one", " two\u2028", "a\nb", "piped\né\n"]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("p.txt", b"caf\xe9\n", "byte 3 is not UTF-8"),
        ("p.txt", b"\n \n", "has no prompt"),
        ("p.jsonl", b'{"prompt": "a"}\n{"text": "b"}\n', "line 2 is not a JSON object"),
        ("p.jsonl", b'{"prompt": "\\ud800"}\n', "line 1: is not valid UTF-8"),
        ("p.jsonl", b"[" * 100_000, "line 1 is not a JSON object"),
    ],
)
def test_a_file_that_has_no_prompts_is_refused(
    model: _Model, hf: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, error: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["generate", hf, "--prompts", str(tmp_path / name)]) == 10
    printed = capsys.readouterr().err
    assert f"error: --prompts={tmp_path / name}: {error}" in printed
    assert "\nhint: " in printed
    assert model.asked == []


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff"])
def test_a_pipe_without_a_prompt_is_refused(
    model: _Model, hf: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    _pipe(monkeypatch, content)
    assert main(["generate", hf]) == 10
    assert capsys.readouterr().err.startswith("error: stdin: ")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--prompt", "a\udcff"], 10),
        (["--prompts", "/nowhere"], 14),
        (["--prompt", "a", "--device", "gpu"], 10),
        (["--prompt", "a", "--top-p", "2"], 10),
        (["--prompt", "a", "--step", "3"], 10),
        (["--history"], 10),
        (["--prompt", "long"], 21),
    ],
)
def test_a_wrong_option_is_an_error_with_a_hint(
    model: _Model, hf: str, capsys: pytest.CaptureFixture[str], options: list[str], code: int
) -> None:
    assert main(["generate", hf, *options]) == code
    assert "\nhint: " in capsys.readouterr().err


def test_a_terminal_is_asked_for_prompts_until_it_quits(
    model: _Model, hf: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["first", "", "long", "SIGINT", "/quit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    before = signal.getsignal(signal.SIGINT)
    assert main(["generate", hf, "--seed", "5"]) == 0
    assert [(prompt, sampling.seed) for prompt, sampling in model.asked] == [("first", 5), ("long", 6), ("SIGINT", 7)]
    assert model.stops == 1, "Ctrl-C ends the text, not the command"
    assert signal.getsignal(signal.SIGINT) is before
    errors = capsys.readouterr().err
    assert "This model continues texts" in errors
    assert "error: prompt: has 9 tokens\nhint: shorten the prompt\n" in errors


def test_a_request_to_end_closes_the_model(model: _Model, hf: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["generate", hf, "--prompt", "SIGTERM", "--prompt", "never"]) == 143
    assert model.is_closed, "so that the exported checkpoint is removed"
    assert [prompt for prompt, _ in model.asked] == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_texts_of_milestones_are_printed_by_prompt(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run()
    where = ["--runs-dir", os.fspath(run.root.parent)]
    assert main(["generate", run.run_id, "--history", *where]) == 0
    assert "has no continuations" in capsys.readouterr().err
    milestones = sorted(read_state(run).milestones)
    for tokens in milestones[:2]:
        texts = [{"prompt": prompt, "text": f"{tokens}\x1b\n\n\n\nend\n", "stop": "x"} for prompt in ("a", "b")]
        continuations.write(run, tokens, {"step": 1}, texts)
    assert main(["generate", run.run_id, "--history", *where]) == 0
    blocks = [
        f"--- {shown} tokens\n{tokens}\\x1b\n\nend\n"
        for tokens, shown in zip(milestones, ("833.3K", "1.67M"), strict=False)
    ]
    assert capsys.readouterr().out == "".join(f"=== {prompt}\n{''.join(blocks)}" for prompt in ("a", "b"))
    assert main(["generate", run.run_id, "--history", "--json", *where]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert main(["status", run.run_id, *where]) == 0
    assert f"a → {milestones[1]}\\x1b end" in capsys.readouterr().out
    text, following = end_lines(view_run(run))[-2:]
    assert text.split(maxsplit=1) == ["text", f"a → {milestones[1]}\\x1b end"]
    assert f"hlatctl generate {run.run_id} · " in following
