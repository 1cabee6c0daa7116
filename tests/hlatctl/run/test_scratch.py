"""Folders for temporary files are private, and none outlives its owner for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hlatctl.run.scratch import private_folder

_OWNER = """
import sys, time
from hlatctl.run.scratch import private_folder
with private_folder("try", within=sys.argv[1]) as own:
    (own.path / "file").write_text("left behind")
    print(own.path, flush=True)
    time.sleep(600)
"""


def test_a_folder_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    with private_folder("try", within=os.fspath(tmp_path)) as own:
        (own.path / "file").touch()
        assert own.path.stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
def test_the_folder_of_a_killed_process_is_removed_and_that_of_a_running_one_is_not(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _OWNER, tmp_path], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        theirs = Path(owner.stdout.readline().strip())
        with private_folder("try", within=os.fspath(tmp_path)):
            assert (theirs / "file").is_file()
        owner.send_signal(signal.SIGKILL)
    assert (theirs / "file").is_file()
    with private_folder("try", within=os.fspath(tmp_path)) as own:
        assert list(tmp_path.iterdir()) == [own.path]


def test_links_and_other_names_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "hlatctl-tmp-job-link").symlink_to(tmp_path / "precious")
    (tmp_path / "hlatctl-old").mkdir()
    with private_folder("try", within=os.fspath(tmp_path)):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hlatctl-old", "hlatctl-tmp-job-link", "precious"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "hlatctl-tmp-job-theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    with private_folder("try", within=os.fspath(tmp_path)):
        pass
    assert theirs.is_dir()
