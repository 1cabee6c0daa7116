"""Handle the signals of a job's processes. Imports little, so that it is set up before heavy imports.

SIGUSR1 asks for evidence of a hang: the stacks of all threads, and the last collectives that the process took part in.
The main thread may be waiting in a collective, where Python runs no handler, so another thread writes the files: the
interpreter's own handler wakes it through a pipe. Until then it costs nothing.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hlatctl.run import files, processes, rank_output, startup
from hlatctl.run.errors import HlatctlError, tell
from hlatctl.run.files import DAMAGED
from hlatctl.run.paths import collectives_name, stacks_name


def run_rank(main: Callable[[], int]) -> NoReturn:
    """Run the main function of a rank, and end its process with the function's exit code.

    After an error, the process prints it and ends without cleaning up. Leaving a process group, and Python's own exit,
    may wait for operations that the other ranks never finish; torchrun ends these only when this process has ended.
    """
    startup.begin()
    try:
        code = main()
    except HlatctlError as error:
        code = tell(error)
    except SystemExit:  # wrong arguments
        raise
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class StopRequest:
    """Whether SIGTERM told this process to stop."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        # Python restores the default action of handled signals when it ends, when a second request could still arrive.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def show_stacks_when_asked() -> None:
    """Print the stacks of all threads to stderr on SIGUSR1, even during a collective that hangs.

    Then the earlier handler runs (:func:`answer_signal`).
    """
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)


def follow_launcher() -> None:
    """Accept requests to stop, print to the node's log, and end when torchrun dies (Linux only).

    ``hlatctl.node`` starts torchrun with these signals blocked, and torchrun's processes inherit that. Torchrun starts
    each process in its own session, so signals to the job's process group don't reach it. A process that survived
    a killed torchrun could write during the next attempt.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    rank_output.send_to_node_log()
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    processes.end_with_parent(launcher)
    # When a parent dies, its process gets a parent outside the job: init, or a scheduler's program.
    if processes.job_of(launcher) != os.environ.get(processes.JOB_ENV, ""):
        sys.exit(f"process {os.getpid()}: the torchrun that started it is gone")


#: Number of newest collectives to keep: about 500 bytes each, from up to thousands of processes.
_COLLECTIVES = 200
#: Prefix and suffix of PyTorch's functions that return a flight recorder; a build has those of its libraries.
_DUMP, _JSON = "_dump_", "_trace_json"
#: The folder for the evidence, and the rank in the names of its files.
_place: tuple[Path, int] | None = None


def keep_evidence_in(folder: Path, rank: int) -> None:
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
                _write(*_place)


def _write(folder: Path, rank: int) -> None:
    """Write the stacks, and then the newest collectives if PyTorch has recorded any.

    Raises an OSError if a file can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    collectives = _newest_collectives()
    if collectives:
        files.write_json(folder / collectives_name(rank), collectives)
    path = folder / stacks_name(rank)  # last: whoever waits for this file also finds the other one
    with path.with_name(f".{path.name}").open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    os.replace(file.name, path)


def _newest_collectives() -> dict[str, Any]:
    """Return the newest entries of PyTorch's flight recorder, by the recorder's name; empty if it has none."""
    library = sys.modules.get("torch._C._distributed_c10d")
    found = {}
    for name in dir(library):
        if name.startswith(_DUMP) and name.endswith(_JSON):
            with suppress(RuntimeError, *DAMAGED):
                if entries := json.loads(getattr(library, name)())["entries"]:
                    found[name.removeprefix(_DUMP).removesuffix(_JSON)] = entries[-_COLLECTIVES:]
    return found
