"""Run by ``trainer.launch`` with a run directory: train, while rank 1 stands still in front of its third batch."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from trainer.__main__ import main
from trainer.data.loader import Batches
from trainer.process import answer_signal, show_stacks_when_asked


def stand_still(batches: type[Batches], before: int) -> None:
    honest, drawn = batches.next, iter(range(1, before))

    def late(self: Batches) -> Any:
        if next(drawn, None) is None:
            threading.Event().wait()
        return honest(self)

    batches.next = late  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        stand_still(Batches, 3)
    answer_signal()
    show_stacks_when_asked()
    sys.exit(main(["--run-dir", sys.argv[1], "--attempt", "1"]))
