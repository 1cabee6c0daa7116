"""Reading ahead: the order that was asked for, a bounded number of requests, and an end that waits for none."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hlatctl.run.errors import DataError
from tests.waiting import WAIT_S, wait_for
from trainer.data.remote import IN_FLIGHT, ReadAhead, in_order


class Slow:
    """Documents that are their own positions; reading one waits until it may go on."""

    is_remote = True

    def __init__(self) -> None:
        self.go_on, self.reading, self.most = threading.Event(), 0, 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, position: int) -> int:
        with self._lock:
            self.reading += 1
            self.most = max(self.most, self.reading)
        self.go_on.wait(WAIT_S)
        with self._lock:
            self.reading -= 1
        return position


def test_requests_at_once_are_bounded_and_results_are_in_order() -> None:
    documents = Slow()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(lambda: list(in_order(documents, range(500, 0, -1))))
        wait_for(lambda: documents.reading == IN_FLIGHT)
        documents.go_on.set()
        assert result.result(WAIT_S) == list(range(500, 0, -1))
    assert documents.most == IN_FLIGHT


def test_a_row_reads_its_documents_in_order_and_closing_ends_a_wait() -> None:
    documents = Slow()
    ahead = ReadAhead(documents, readers=2)
    documents.go_on.set()
    assert [ahead.read(0, nth, lambda n: 3 * n) for nth in range(50)] == list(range(0, 150, 3))
    documents.go_on.clear()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(ahead.read, 1, 0, lambda n: n)
        wait_for(lambda: documents.reading > 0)
        ahead.close()
        with pytest.raises(DataError, match="closed"):
            waits.result(WAIT_S)
    documents.go_on.set()
