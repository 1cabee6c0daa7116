"""Run by torchrun with a run directory: train with slow data on rank 1."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from trainer.__main__ import main
from trainer.data.loader import Batches


def slow_down(batches: type[Batches], seconds: float) -> None:
    honest = batches.next

    def late(self: Batches) -> Any:
        time.sleep(seconds)
        return honest(self)

    batches.next = late  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        slow_down(Batches, 0.1)
    sys.exit(main(["--run-dir", sys.argv[1], "--attempt", "1"]))
