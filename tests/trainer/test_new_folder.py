"""Folders that are filled under another name: what killed processes leave is removed, what others fill is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trainer.new_folder import partial_folder

#: Fills a folder for the target that it is given, and is killed.
_DIES = """
import os, sys
from pathlib import Path
from trainer.new_folder import partial_folder
with partial_folder(Path(sys.argv[1])) as partial:
    (partial / "half").write_text("of it")
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_left_is_removed_by_the_next_for_the_same_target(tmp_path: Path) -> None:
    target = tmp_path / "abc"
    subprocess.run([sys.executable, "-c", _DIES, os.fspath(target)], check=False)
    (left_over,) = tmp_path.iterdir()
    (tmp_path / ".other.1.partial").mkdir()
    with partial_folder(target) as partial:
        assert not left_over.exists()
        partial.rename(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.1.partial", "abc"]


def test_what_a_living_process_fills_is_left_alone(tmp_path: Path) -> None:
    with partial_folder(tmp_path / "abc") as filled:
        filled.rename(tmp_path / ".abc.1.partial")  # as that of another process
        with partial_folder(tmp_path / "abc"):
            assert (tmp_path / ".abc.1.partial").is_dir()
