"""Files and folders appear complete or not at all, in every state that a disk, a person or a program can leave them in.

Also file locks, files that one process of each node reads for all, and private folders for temporary files.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlatctl.run import files
from hlatctl.run.errors import DamagedFileError, RunBusyError, StorageError
from hlatctl.run.files import (
    JOB_FOLDER_ENV,
    check_size,
    files_below,
    lines,
    lock_folder,
    locked_file,
    new_file,
    new_folder,
    parse_json,
    partial_folder,
    private_folder,
    read_bytes,
    read_text,
    reading,
    remove_unlocked,
    replace_folder,
    try_lock,
)

#: Fills a folder for the target that it is given, and is killed.
_DIES = """
import os, sys
from pathlib import Path
from hlatctl.run.files import partial_folder
with partial_folder(Path(sys.argv[1])) as partial:
    (partial / "half").write_text("of it")
    os.kill(os.getpid(), 9)
"""


@pytest.mark.processes
def test_the_folder_of_a_killed_process_is_removed_by_the_next_one_for_the_same_target(tmp_path: Path) -> None:
    target = tmp_path / "abc"
    subprocess.run([sys.executable, "-c", _DIES, os.fspath(target)], check=False)
    (left_over,) = tmp_path.iterdir()
    (tmp_path / ".other.1.partial").mkdir()
    with partial_folder(target) as partial:
        assert not left_over.exists()
        partial.rename(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.1.partial", "abc"]


def test_the_folder_of_a_running_process_is_kept(tmp_path: Path) -> None:
    """Also that of a process with the same id on another host."""
    with partial_folder(tmp_path / "abc") as first, partial_folder(tmp_path / "abc") as second:
        assert first.is_dir()
        assert second.is_dir()
        assert first != second


def test_a_file_appears_when_it_is_complete_and_a_failure_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    with new_file(path) as temporary:
        temporary.write_text("old")
        assert not path.exists()
    monkeypatch.setattr(os, "fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), new_file(path) as temporary:
        temporary.write_text("new")
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "old"


def test_two_writers_of_one_file_have_temporary_files_of_their_own(tmp_path: Path) -> None:
    with new_file(tmp_path / "a.txt") as first, new_file(tmp_path / "a.txt") as second:
        first.write_text("first")
        second.write_text("second")
    assert (tmp_path / "a.txt").read_text() == "first"


def test_a_new_folder_appears_when_it_is_complete_and_refuses_one_that_is_not_empty(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(RuntimeError), new_folder(target):
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    target.mkdir()
    with new_folder(target) as partial:
        (partial / "weights").touch()
    assert [path.name for path in target.iterdir()] == ["weights"]
    with pytest.raises(StorageError, match="not an empty folder"), new_folder(target):
        pass


@pytest.mark.parametrize(
    ("umask", "folder_mode", "file_mode"), [(0o022, 0o755, 0o644), (0o027, 0o750, 0o640), (0o077, 0o700, 0o600)]
)
def test_what_is_in_a_new_folder_has_the_permissions_of_new_files(
    tmp_path: Path, umask: int, folder_mode: int, file_mode: int
) -> None:
    before = os.umask(umask)
    try:
        with new_folder(tmp_path / "model") as partial:
            (partial / "tokenizer").mkdir(mode=0o700)
            for file in (partial / "model.safetensors", partial / "tokenizer" / "tokenizer.json"):
                file.touch(mode=0o600)
            partial.chmod(0o700)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model", *(tmp_path / "model").rglob("*"))}
    assert modes == {
        "model": folder_mode,
        "tokenizer": folder_mode,
        "model.safetensors": file_mode,
        "tokenizer.json": file_mode,
    }


def test_a_folder_replaces_one_of_the_same_name(tmp_path: Path) -> None:
    for name in ("temporary", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replaced = replace_folder(tmp_path / "temporary", tmp_path / "target")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["target", "target/temporary"]
    assert replaced == tmp_path / "target"


def _refuse() -> None:
    raise RunBusyError("busy")


def test_a_locked_file_refuses_a_second_holder_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.lock"
    with locked_file(path), pytest.raises(RunBusyError), locked_file(path, _refuse):
        pass
    with locked_file(path, _refuse) as file:
        assert file.write(b"mine") == 4


def test_without_a_callback_the_lock_is_awaited(tmp_path: Path) -> None:
    path, order = tmp_path / "a.lock", []

    def second() -> None:
        with locked_file(path):
            order.append("second")

    waiting = threading.Thread(target=second)
    with locked_file(path):
        waiting.start()
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]


def test_shared_locks_exclude_an_exclusive_one_only(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    path.touch()
    with path.open() as one, path.open() as two, path.open() as three:
        assert try_lock(one, shared=True)
        assert try_lock(two, shared=True)
        assert not try_lock(three)


def test_a_shared_lock_that_somebody_keeps_refuses_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.lock"
    path.touch()
    monkeypatch.setattr("hlatctl.run.files._LOOKS_S", 0.01)
    with path.open() as kept:
        assert try_lock(kept, shared=True)
        with pytest.raises(RunBusyError), locked_file(path, _refuse):
            pass


def test_a_process_that_only_looks_at_a_lock_refuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.lock"
    path.touch()
    with path.open() as looker:
        assert try_lock(looker, shared=True)
        monkeypatch.setattr("hlatctl.run.files.time.sleep", lambda _: looker.close())
        with locked_file(path, _refuse), path.open() as other:
            assert not try_lock(other, shared=True)


def test_a_file_system_without_locks_is_named_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_file: object, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(StorageError, match=r"a\.lock: can't be locked .*\n?.*flock"), locked_file(tmp_path / "a.lock"):
        pass
    assert lock_folder(tmp_path) is None


def test_only_unlocked_folders_are_removed(tmp_path: Path) -> None:
    used, unused, link = tmp_path / "used", tmp_path / "unused", tmp_path / "link"
    used.mkdir()
    unused.mkdir()
    link.symlink_to(used)
    lock = lock_folder(used, shared=True)
    assert lock is not None
    for folder in (used, unused, link, tmp_path / "missing"):
        remove_unlocked(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "used"]
    os.close(lock)


def test_the_processes_of_a_job_read_a_shared_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job").mkdir()
    monkeypatch.setenv(JOB_FOLDER_ENV, os.fspath(tmp_path / "job"))
    shared = tmp_path / "config.yaml"
    shared.write_text("seed: 1\n")
    assert files.read_shared_text(shared) == "seed: 1\n"
    shared.unlink()
    assert files.read_shared_text(shared) == "seed: 1\n"


def test_a_process_without_a_job_and_one_that_cannot_copy_read_the_file_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "config.yaml"
    shared.write_text("seed: 1\n")
    monkeypatch.delenv(JOB_FOLDER_ENV, raising=False)
    assert files.read_shared_text(shared) == "seed: 1\n"
    (tmp_path / "job").write_text("not a folder")
    monkeypatch.setenv(JOB_FOLDER_ENV, os.fspath(tmp_path / "job"))
    assert files.read_shared_text(shared) == "seed: 1\n"


def test_a_missing_file_is_named_and_leaves_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job").mkdir()
    monkeypatch.setenv(JOB_FOLDER_ENV, os.fspath(tmp_path / "job"))
    with pytest.raises(FileNotFoundError) as error:
        files.read_shared_text(tmp_path / "config.yaml")
    assert error.value.filename == os.fspath(tmp_path / "config.yaml")
    assert not (tmp_path / "job" / "config.yaml").exists()


BAD_JSON = [b"", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"[" * 200 + b"]" * 200]
OUT_OF_RANGE = ["1e999", "-1e999", "9" * 5000, "9" * 400, str(2**64 + 1), "NaN", "Infinity", "-Infinity"]


@pytest.mark.parametrize("content", BAD_JSON, ids=range(len(BAD_JSON)))
def test_invalid_or_deeply_nested_json_is_a_value_error(content: bytes) -> None:
    for any_number in (False, True):
        with pytest.raises(ValueError, match=r"."):
            parse_json(content, any_number=any_number)


@pytest.mark.parametrize("text", OUT_OF_RANGE, ids=lambda text: text[:10])
def test_a_number_out_of_range_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(f'{{"a": {text}}}')


def test_files_of_other_programs_may_hold_such_numbers() -> None:
    value = parse_json('{"model_max_length": 1000000000000000019884624838656, "a": 1e999}', any_number=True)
    assert value == {"model_max_length": 1000000000000000019884624838656, "a": float("inf")}


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)
def test_written_values_are_read_back_unchanged(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_a_file_that_is_not_regular_is_an_error_and_does_not_block(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "a.json"
    make(path)
    with pytest.raises(OSError, match=r"."):
        files.read_json(path)
    with pytest.raises(DamagedFileError, match=r"a\.json: can't be used \("), reading(path):
        files.read_json(path)


@pytest.mark.parametrize("content", ["[]", "{}", "null", '{"a": {}}', '{"a": [1e999]}', '{"a": [[]]}'])
def test_a_file_that_holds_something_else_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DamagedFileError, match=r"a\.json: can't be used") as caught, reading(path, hint="remove it"):
        int(files.read_json(path)["a"][0])
    assert caught.value.hint == "remove it"


def test_a_file_that_is_too_large_is_named_with_its_size_and_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(8 << 30)
    for read in (files.read_json, read_bytes, read_text, check_size):
        with pytest.raises(DamagedFileError, match=r"has 8,589,934,592 bytes, the limit is 67,108,864"), reading(path):
            read(path)
    with pytest.raises(OSError, match="the limit is 5"):
        read_bytes(Path("/proc/self/status"), 5)  # the kernel says that it has 0 bytes


def test_lines_are_yielded_with_their_length_and_only_the_beginning_of_long_ones() -> None:
    content = b"short\n" + b"x" * 20 + b"\n\n1234567890\n" + b"y" * 30
    found = list(lines(io.BytesIO(content), 10))
    assert found == [(b"short\n", 6), (b"x" * 11 + b"\n", 21), (b"\n", 1), (b"1234567890\n", 11), (b"y" * 11, 30)]


_OWNER = """
import sys, time
from hlatctl.run.files import private_folder
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


def test_files_are_listed_without_following_links_to_folders(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    for name in ("a", "b/d", "b/c/e"):
        (tmp_path / name).touch()
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    below = [tmp_path / name for name in ("a", "b/c/e", "b/d", "b/loop")]
    assert files_below(tmp_path, most=7) == below
    assert files_below(tmp_path, most=7, depth=1) == [path for path in below if path.name != "e"]
    assert files_below(tmp_path / "none", most=7) == []


def test_a_folder_with_too_many_files_is_refused(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / str(number)).mkdir()
    with pytest.raises(ValueError, match="has more than 3 files and folders"):
        files_below(tmp_path, most=3)
