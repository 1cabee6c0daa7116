"""Run under torchrun: join a process group when the test allows it; not a test by itself.

    peers.py FOLDER

Rank 0 joins the group first. The others start when FOLDER has a file ``let-them-start`` or ``let-them-come``, and
connect when it has the second one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hlatctl.run import peers
from hlatctl.run.errors import run_main
from trainer import rendezvous

_TIMEOUT = timedelta(minutes=15)


def main() -> int:
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    start, come = folder / "let-them-start", folder / "let-them-come"
    if rank != "0":
        _wait_until(lambda: start.exists() or come.exists())
        connect = dist.init_process_group

        def connect_when_allowed(*arguments: Any, **named: Any) -> None:
            _wait_until(come.exists)
            connect(*arguments, **named)

        setattr(dist, "init_process_group", connect_when_allowed)  # noqa: B010
    (folder / f"joining-{rank}").touch()
    rendezvous.join("gloo", timeout=_TIMEOUT)
    with peers.connecting("gloo"):
        beside = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    total = torch.ones(1)
    dist.all_reduce(total, group=beside)
    (folder / f"met-{rank}").write_text(str(int(total)))
    _wait_until((folder / "let-them-go").exists)
    dist.destroy_process_group()
    return 0


def _wait_until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(run_main(main))
