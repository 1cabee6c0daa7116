"""``python -m tests.flows.sweep.killed_drivers SWEEP_DIR SEED KILLS``: kill the drivers of a sweep at random events.

Each driver is a forked process that kills itself at the n-th event that it journals, before or after writing it. After
KILLS deaths a driver may finish. Prints how many died.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

from flows.sweep.driver import drive
from hlatctl.run.journal import Event, JournalWriter
from hlatctl.run.paths import SweepPaths

_MOST_EVENTS = 100


def _die_at(nth: int, *, after: bool) -> None:
    append, count = JournalWriter.append, iter(range(1, sys.maxsize))

    def deadly(self: JournalWriter, kind: str, *, durable: bool = False, **fields: object) -> Event:
        dies = next(count) == nth
        if dies and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        event = append(self, kind, durable=durable, **fields)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return event

    JournalWriter.append = deadly  # type: ignore[method-assign]


def main() -> int:
    sweep, chance, lives = SweepPaths(Path(sys.argv[1])), random.Random(int(sys.argv[2])), int(sys.argv[3])
    deaths = 0
    while True:
        nth, after = chance.randint(1, _MOST_EVENTS), chance.random() < 0.5
        pid = os.fork()
        if pid == 0:
            if deaths < lives:
                _die_at(nth, after=after)
            drive(sweep, lambda text: None)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            print(deaths)
            return os.WEXITSTATUS(status)
        deaths += 1


if __name__ == "__main__":
    sys.exit(main())
