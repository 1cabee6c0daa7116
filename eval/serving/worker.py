"""``python -m eval.serving.worker --store FILE``: one process of a copy of the evaluated model, for ``pool``.

stdin and stdout carry lines of JSON. First come the settings (``pool.Settings``), answered by ``{"done": null}``.
Then each ``{"do": KIND, ...}`` is answered by ``{"done": RESULT}``, ``{"error": ...}`` or ``{"exhausted": BYTES}``. The
last asks for a restart of the copy in which a batch may use that much memory. The variables ``RANK`` and ``WORLD_SIZE``
identify this process within the copy. The process ends with its stdin or its parent.

The processes of a copy exchange only tensors. They find each other through FILE, in a private folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conf.devices import DEVICES
from conf.sampling import Sampling
from eval import generate, harness, validation
from eval.serving import memory, model
from eval.serving.scoring import Answer, ScoringRow
from hlatctl.run import peers, processes
from hlatctl.run.errors import HlatctlError, run_main, to_record


class _Worker:
    """A loaded model; its public methods are the kinds of jobs."""

    def __init__(self, settings: dict[str, Any], store: Path) -> None:
        size, index = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
        if size > 1:
            _join(settings["device"], store, size)
        self._loaded = model.load(
            Path(settings["folder"]),
            seq_len=settings["max_length"],
            device=settings["device"],
            dtype=settings["dtype"],
            index=index,
            tensor_parallel_size=size,
        )
        options = {key: settings[key] for key in ("batch_size", "processes", "most_bytes", "share_prefixes")}
        self._lm = harness.wrap(self._loaded, **options)

    def score(self, rows: list[tuple[list[int], list[list[int]]]]) -> list[list[Answer]]:
        scores: list[list[Answer]] = self._lm.score([ScoringRow(tokens, answers) for tokens, answers in rows])
        return scores

    def generate(self, requests: list[tuple[str, dict[str, Any]]], seed: int) -> list[str]:
        import torch

        random.seed(seed)
        torch.manual_seed(seed)
        texts: list[str] = self._lm.generate_until([SimpleNamespace(args=tuple(request)) for request in requests])
        return texts

    def losses(self, windows: list[list[int]]) -> list[float]:
        return validation.window_losses(self._loaded.model, windows)

    def continue_prompt(self, ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        return dataclasses.asdict(generate.generate(self._loaded, ids, Sampling(**sampling)))


_KINDS = ("score", "generate", "losses", "continue_prompt")


def _join(device: str, store: Path, size: int) -> None:
    """Connect the processes of a copy; LaunchError if another user's process is connected."""
    import torch
    import torch.distributed as dist

    if model.is_there(device) and DEVICES[device].own_for_each_process:
        torch.get_device_module(device).set_device(int(os.environ["LOCAL_RANK"]))
    shared = dist.FileStore(str(store), size)  # type: ignore[attr-defined] # public, but not in its module's list
    backend, rank = DEVICES[device].process_group, int(os.environ["RANK"])
    peers.meet(shared, rank, size)
    with peers.connecting(backend):
        dist.init_process_group(backend, store=shared, rank=rank, world_size=size)


def main() -> int:
    """Do the jobs of stdin; return 0 at its end."""
    parser = argparse.ArgumentParser(prog="python -m eval.serving.worker", description="Compute for an evaluation.")
    parser.add_argument("--store", type=Path, required=True, help="file through which processes find each other")
    options = parser.parse_args()
    output = processes.serve_parent()
    worker: _Worker | None = None
    with suppress(BrokenPipeError):
        for line in sys.stdin:
            job, result = json.loads(line), None
            try:
                if worker is None:
                    worker = _Worker(job, options.store)
                else:
                    kind = job.pop("do")
                    assert kind in _KINDS, kind
                    result = getattr(worker, kind)(**job)
                answer = {"done": result}
            except HlatctlError as error:
                answer = {"error": to_record(error)}
            except memory.Exhausted as error:
                answer = {"exhausted": error.most_bytes}
            print(json.dumps(answer), file=output, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
