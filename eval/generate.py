"""``python -m eval.generate --scratch DIR``: continue prompts, one after the other, for the process that sends them.

stdin and stdout carry lines of JSON. First comes ``{"model", "context_tokens", "device", "needs_device",
"after_document"}``, answered by ``{"ready": {"device", "parameters", "context_tokens"}}``. Then each ``{"prompt",
"sampling"}`` is answered by ``{"text"}`` for each piece and ``{"end": {...}}`` (``eval.generation.Text``), or by
``{"refused", "hint"}``. SIGINT ends the text that is being generated. The process ends with its stdin or its parent.

torch is imported before the first line is read, so that a checkpoint can be exported meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from conf.sampling import Sampling
from eval import generation, model
from hlatctl.run import processes
from hlatctl.run.errors import EvaluationError, run_main

#: Context in tokens of a model whose configuration sets no limit.
_UNLIMITED = 1 << 30


class _Answers:
    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._is_stopped = False
        self._loaded: model.Loaded | None = None
        self._after_document = True

    def stop(self, *_: Any) -> None:
        """End the text that is being generated; a signal handler."""
        self._is_stopped = True

    def load(self, asked: dict[str, Any]) -> None:
        device = str(asked["device"])
        if not model.is_there(device):
            if asked["needs_device"]:
                raise EvaluationError(f"--device={device}: PyTorch finds no such device here", hint="use --device cpu")
            device = "cpu"
        name = model.device_name(device)
        limit = asked["context_tokens"] or _UNLIMITED
        self._loaded = model.load(Path(asked["model"]), seq_len=limit, device=device)
        self._after_document = bool(asked["after_document"])
        parameters = sum(tensor.numel() for tensor in self._loaded.model.parameters())
        self._say(ready={"device": name, "parameters": parameters, "context_tokens": self._loaded.max_length})

    def answer(self, asked: dict[str, Any]) -> None:
        assert self._loaded is not None, "the first line names the model"
        self._is_stopped, started = False, time.monotonic()
        try:
            ids = generation.encode(self._loaded, str(asked["prompt"]), after_document=self._after_document)
            text = generation.generate(
                self._loaded,
                ids,
                Sampling(**asked["sampling"]),
                write=lambda piece: self._say(text=piece),
                is_stopped=lambda: self._is_stopped,
            )
        except EvaluationError as error:
            self._say(refused=error.message, hint=error.hint)
            return
        self._say(end={**dataclasses.asdict(text), "wall_s": round(time.monotonic() - started, 3)})

    def _say(self, **fields: Any) -> None:
        print(json.dumps(fields), file=self._output, flush=True)


def main() -> int:
    """Answer the lines of stdin; return 0 at its end."""
    parser = argparse.ArgumentParser(prog="python -m eval.generate", description="Continue prompts with a model.")
    parser.add_argument("--scratch", type=Path, required=True, help="folder for caches")
    options = parser.parse_args()
    output = processes.serve_parent()
    answers = _Answers(output)
    signal.signal(signal.SIGINT, answers.stop)
    model.settle_environment(options.scratch, offline=True)
    with suppress(ImportError):  # loading the model says which package is missing
        import torch
        import transformers

        del torch
        transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    with suppress(BrokenPipeError):
        for line in sys.stdin:
            asked = json.loads(line)
            if "model" in asked:
                answers.load(asked)
            else:
                answers.answer(asked)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
