"""The process that sends a run's messages while its driver lives, and reports the driver's death.

``python -m flows.tracking.notify.follower RUN_DIR`` starts it. A slow or absent service delays only this process.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType

from conf.of_run import of_run
from flows.tracking.notify.notes import driver_gone
from flows.tracking.notify.notifier import Notifier, only_notifier
from hlatctl.run import files
from hlatctl.run.errors import RunBusyError, StorageError, run_main
from hlatctl.run.fold import read_state
from hlatctl.run.lease import driver_pid
from hlatctl.run.paths import RunPaths
from hlatctl.run.reader import INTERRUPTED, status_of

_POLL_S = 2.0
#: Seconds that a run may have no driver before people are notified; a service manager may resume it immediately.
GRACE_S = 60.0
#: Seconds for which messages are retried after the driver's end.
_LINGER_S = 600.0
#: Content of a driver's lease just before the driver writes its name, and in its last moment.
_UNKNOWN_PID = 0


def follow(run: RunPaths, *, grace_s: float = GRACE_S, poll_s: float = _POLL_S) -> None:
    """Send messages until the run has ended, or another driver has taken over.

    Args:
        run: the run; its flow journals ``head_started`` before it starts a follower.
        grace_s: see ``GRACE_S``.
        poll_s: seconds between two reads of the journal.

    Raises:
        ConfigError, StorageError: the run can't be read.
    """
    pid = driver_pid(run)
    while True:
        try:
            with files.created_like(run.root), only_notifier(run):
                _follow(run, pid, grace_s, poll_s)
                return
        except RunBusyError:  # that of an earlier driver, which ends when it sees this one
            if driver_pid(run) not in (pid, _UNKNOWN_PID):
                return
            time.sleep(poll_s)


def _follow(run: RunPaths, pid: int | None, grace_s: float, poll_s: float) -> None:
    notifier, alone_since_s = Notifier(run, of_run(run)), None
    while True:
        driven_by = driver_pid(run)  # before the journal is read, so that this includes everything before the end
        _poll(notifier)
        if driven_by not in (None, pid, _UNKNOWN_PID):
            return
        if driven_by is not None:
            alone_since_s = None
            if notifier.ended and not notifier.waiting:
                return
        else:
            now_s = time.monotonic()
            alone_since_s = alone_since_s or now_s
            alone_s = now_s - alone_since_s
            if pid is None and not notifier.waiting:  # nobody drove the run: `hlatctl eval` has evaluated it
                return
            if alone_s >= grace_s and pid is not None and _is_interrupted(run):
                notifier.add(driver_gone(pid, run), time.time())
                _poll(notifier)
            if alone_s >= (_LINGER_S if notifier.waiting else 0 if notifier.ended else grace_s):
                return
        time.sleep(poll_s)


def _poll(notifier: Notifier) -> None:
    try:
        notifier.poll()
    except StorageError as error:
        print(error, file=sys.stderr, flush=True)


def _is_interrupted(run: RunPaths) -> bool:
    return status_of(read_state(run), is_driven=False) == INTERRUPTED


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def main(argv: list[str]) -> int:
    """Run ``python -m flows.tracking.notify.follower RUN_DIR``."""
    if len(argv) != 1 or not RunPaths(Path(argv[0])).config.is_file():
        print("usage: python -m flows.tracking.notify.follower RUN_DIR", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    follow(RunPaths(Path(argv[0]).absolute()))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:])))
