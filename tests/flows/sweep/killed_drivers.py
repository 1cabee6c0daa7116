"""``python -m tests.flows.sweep.killed_heads SWEEP_DIR SEED LIVES``: a sweep's head dies again and again.

Every life is a forked process that drives the sweep and kills itself with the n-th event that anything in it journals,
before or after the event is on the disk. After so many deaths one may live. Prints how many have died.
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
