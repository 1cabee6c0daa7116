"""Run by ``trainer.launch`` with a folder: three processes of which one is killed; not a test by itself."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def share() -> None:
    """Called by ``trainer.launch`` before it forks."""
    os.environ["SHARED_BY"] = str(os.getpid())


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    own = {"session": os.getsid(0), "pid": os.getpid(), "argv": sys.argv[1:], "imported": "torch" in sys.modules}
    own |= {name: os.environ[name] for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SHARED_BY")}
    (folder / f"{rank}.tmp").write_text(json.dumps(own))
    (folder / f"{rank}.tmp").rename(folder / f"{rank}.json")
    while not (folder / "go").exists():
        time.sleep(0.01)
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    while rank == "2" and not stops:
        time.sleep(0.01)
    sys.exit(75 if rank == "2" else 0)
