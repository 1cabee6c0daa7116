"""Record a hang: the stacks of all threads of a process, and the last collectives that it took part in.

SIGUSR1 triggers it. The main thread may be waiting in a collective, where Python runs no handler, so another thread
writes the files: the interpreter's own handler wakes it through a pipe. Until then it costs nothing.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from hlatctl.run import files
from hlatctl.run.files import DAMAGED
from hlatctl.run.paths import collectives_name, stacks_name

#: Number of newest collectives to keep: about 500 bytes each, from up to thousands of processes.
_COLLECTIVES = 200
#: Prefix and suffix of PyTorch's functions that return a flight recorder; a build has those of its libraries.
_DUMP, _JSON = "_dump_", "_trace_json"


#: The folder for the evidence, and the rank in the names of its files.
_place: tuple[Path, int] | None = None


def keep_in(folder: Path, rank: int) -> None:
    """Set the folder for this process's evidence, which is created when it is needed."""
    global _place
    _place = folder, rank


def answer_signal() -> None:
    """Write the evidence whenever this process gets SIGUSR1. Call this in the main thread, before other handlers."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)  # the pipe only gets signals that have a handler
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(reader,), name="evidence", daemon=True).start()


def _wait(reader: int) -> None:
    while signals := os.read(reader, 64):
        if signal.SIGUSR1 in signals and _place:
            with suppress(OSError):  # a full disk; the log has the stacks
                write(*_place)


def write(folder: Path, rank: int) -> None:
    """Write the stacks, and then the newest collectives if PyTorch has recorded any.

    Raises:
        OSError: a file can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    collectives = newest_collectives()
    if collectives:
        files.write_json(folder / collectives_name(rank), collectives)
    path = folder / stacks_name(rank)  # last: whoever waits for this file also finds the other one
    with path.with_name(f".{path.name}").open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    os.replace(file.name, path)


def newest_collectives() -> dict[str, Any]:
    """Return the newest entries of PyTorch's flight recorder, by the recorder's name; empty if it has none."""
    library = sys.modules.get("torch._C._distributed_c10d")
    found = {}
    for name in dir(library):
        if name.startswith(_DUMP) and name.endswith(_JSON):
            with suppress(RuntimeError, *DAMAGED):
                if entries := json.loads(getattr(library, name)())["entries"]:
                    found[name.removeprefix(_DUMP).removesuffix(_JSON)] = entries[-_COLLECTIVES:]
    return found
