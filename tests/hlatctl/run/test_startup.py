from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Iterator

import pytest

from hlatctl.run import startup


@pytest.fixture(autouse=True)
def usual() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(*startup._USUAL)  # a command of an earlier test may have changed it in this process
    yield startup._USUAL
    gc.set_threshold(*before)
    gc.unfreeze()


def test_a_program_searches_for_garbage_seldom_until_its_imports_are_done(
    usual: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_the_end: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", at_the_end.append)
    startup.begin()
    assert gc.get_threshold()[0] > 10 * usual[0]
    startup.imported()
    assert gc.get_threshold() == usual
    assert gc.get_freeze_count() > 10_000, "the modules of this process"
    gc.unfreeze()
    (end,) = at_the_end
    end()
    assert gc.get_freeze_count() > 10_000
