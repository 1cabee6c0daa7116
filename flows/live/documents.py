"""The documents of a step. The trainer's data loader finds them, in a process of its own that takes seconds."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from conf.of_run import check_step, of_run
from flows.runtime.ask import ask
from hlatctl.report.run_view import is_simulated
from hlatctl.run.errors import DataError, RunBusyError
from hlatctl.run.paths import RunPaths

_TIMEOUT_S = 300.0
#: One at a time: each one imports PyTorch and may replay thousands of batches.
_one = threading.Lock()


def documents(run: RunPaths, step: int) -> dict[str, Any]:
    """Return the documents that a step was trained on, with the beginning of each text.

    Raises:
        ConfigError: the run has no such step.
        DataError: the run is simulated, or its corpus is missing.
        RunBusyError: another question is being answered.
        LaunchError: it takes too long.
    """
    if is_simulated(run):
        raise DataError(f"run {run.run_id}: is simulated, so it has no corpus", hint="choose another run")
    check_step(of_run(run), step, "step")  # before a process is started that imports PyTorch
    if not _one.acquire(blocking=False):
        raise RunBusyError("the documents of another step are being read", hint="wait a few seconds, then retry")
    try:
        answer = json.loads(
            ask(
                "trainer.data.at",
                "--run-dir",
                os.fspath(run.root),
                "--step",
                str(step),
                timeout_s=_TIMEOUT_S,
                yields=True,
            )
        )
    finally:
        _one.release()
    return {
        "step": step,
        "batch": answer["batch"],
        "trained": answer["trained"],
        "documents": [
            {
                "sequence": index,
                "source": document.get("source"),
                "id": f"{document['file']}:{document['row']}",
                "first_token": document["first_token"],
                "tokens": document["tokens"],
                "text": document["text"],
            }
            for index, sequence in enumerate(answer["sequences"])
            for document in sequence
        ],
    }
