"""Work that several runs need, such as a corpus: one run does it, the others wait for the result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.runtime.context import FlowContext
from hlatctl.run.lease import Holder, hold

_POLL_S = 0.5


@contextmanager
def alone(ctx: FlowContext, folder: Path, what: str) -> Iterator[None]:
    """Wait until no other run fills a folder, and keep other runs from filling it during the block.

    The block must look for the result first, because another run may have made it meanwhile.

    Args:
        ctx: of the run.
        folder: that all runs share.
        what: the work, for the message.

    Raises:
        StoppedError: the run was asked to stop while it waited.
        StorageError: the lease can't be written.
    """
    told: list[Holder] = []

    def wait(holder: Holder) -> None:
        if holder not in told:
            told.append(holder)
            ctx.message(f"{what}: waiting for {holder}, which does the same for another run")
        ctx.check_stop()
        time.sleep(_POLL_S)  # also in a dry run: its clock stands still while another thread works

    with hold(folder.with_name(f".{folder.name}.lock"), wait):
        yield
