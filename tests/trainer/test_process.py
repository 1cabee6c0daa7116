"""How a rank's process ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from hlatctl.run.errors import ERROR_FILE_ENV, DataError, load_error
from tests.trainer.conftest import Finish, Start

pytestmark = pytest.mark.processes

_RANK = """
import atexit, sys, time
from hlatctl.run.errors import DataError
from trainer.process import run_rank

def main():
    atexit.register(lambda: print("cleaned up"))
    {}

run_rank(main)
"""


@pytest.mark.parametrize(
    ("ending", "code", "said", "cleans_up"),
    [
        ("return 75", 75, "", True),
        ("sys.exit(2)", 2, "", True),
        ("raise DataError('no corpus')", DataError.exit_code, "error: no corpus", False),
        ("print('before'); 1 / 0", 1, "ZeroDivisionError: division by zero", False),
    ],
)
def test_a_rank_that_failed_tells_its_error_and_ends_without_cleaning_up(
    ending: str, code: int, said: str, cleans_up: bool, tmp_path: Path, start: Start, finish: Finish
) -> None:
    """What cleans up may wait for the other ranks, such as an NCCL group."""
    program = tmp_path / "rank.py"
    program.write_text(_RANK.format(ending))
    output = finish(start(str(program), **{ERROR_FILE_ENV: str(tmp_path / "error.json")}), code)
    assert said in output
    assert ("cleaned up" in output) == cleans_up
    assert ("before" in ending) == ("before" in output)
    assert (load_error(tmp_path / "error.json") is not None) == ("DataError" in ending)
