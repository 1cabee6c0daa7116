"""From a store to a disk: what arrives, what never does, and what a second call does."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hlatctl.cache import graphs, warm
from hlatctl.cache.store import MANIFEST, Folder, Store, open_store
from hlatctl.run.errors import StorageError
from tests.hlatctl.cache.conftest import VERSION, MakeModule, neff, tree


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "worker" / "cache"


def test_complete_modules_are_copied_and_a_second_call_copies_nothing(
    source: Path, target: Path, make_module: MakeModule
) -> None:
    for number in range(3):
        make_module(number)
    unfinished = make_module(3, done=False)
    (unfinished / "model.hlo_module.pb.gz.lock").touch()
    done = warm.warm(Folder(source), target)
    assert (done.modules, done.copied) == (3, 3)
    assert done.skipped == [f"{VERSION}/{unfinished.name}: has no model.done: its compilation did not finish"]
    assert tree(target) == {path: content for path, content in tree(source).items() if unfinished.name not in path}
    assert {path.name for path in target.iterdir()} == {VERSION, MANIFEST, ".warm.lock"}
    again = warm.warm(Folder(source), target)
    assert (again.modules, again.copied, again.copied_bytes) == (3, 0, 0)


def test_second_call_reads_no_file_until_the_machine_is_rebooted(
    source: Path, target: Path, make_module: MakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_module(1)
    warm.warm(Folder(source), target)
    read: list[str] = []

    def reading(store: Store, path: str) -> str:
        read.append(path)
        return graphs.sha256_of(store, path)

    monkeypatch.setattr(warm, "sha256_of", reading)
    warm.warm(Folder(source), target)
    assert read == []
    monkeypatch.setattr(graphs, "boot_id", lambda: "another")
    assert warm.warm(Folder(source), target).copied == 0
    assert len(read) == 4


def test_modules_that_differ_on_the_worker_are_moved_aside_and_copied_again(
    source: Path, target: Path, make_module: MakeModule
) -> None:
    module = make_module(1)
    make_module(2)
    warm.warm(Folder(source), target)
    damaged = target / VERSION / module.name / "model.neff"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    done = warm.warm(Folder(source), target)
    name = f"{VERSION}/{module.name}"
    assert done.quarantined == [f"{name}: {name}/model.neff was damaged or changed"]
    assert done.copied == 1
    assert tree(target) == tree(source)
    (aside,) = (target / ".quarantine").iterdir()
    assert aside.name.startswith(f"{VERSION}__{module.name}-")
    assert (aside / "model.neff").read_bytes().endswith(b"!")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "model.neff: missing"), (neff(b"programZ"), "checksum differs"), (neff(b"p"), "bytes, expected")],
)
def test_module_that_differs_from_the_manifest_is_not_copied_and_all_others_are(
    source: Path, target: Path, make_module: MakeModule, content: bytes | None, reason: str
) -> None:
    make_module(1)
    broken = make_module(2)
    graphs.write_manifest(source)
    (broken / "model.neff").unlink()
    if content is not None:
        (broken / "model.neff").write_bytes(content)
    with pytest.raises(StorageError, match="1 of 2 modules are broken, and were not copied") as error:
        warm.warm(Folder(source), target)
    assert reason in error.value.message
    assert f"hlatctl cache verify {source} --quarantine" in error.value.hint
    assert len(tree(target)) == 4
    assert not (target / VERSION / broken.name).exists()


def test_truncated_program_is_not_copied_without_a_manifest(
    source: Path, target: Path, make_module: MakeModule
) -> None:
    make_module(1)
    broken = make_module(2) / "model.neff"
    broken.write_bytes(broken.read_bytes()[:-2])
    with pytest.raises(StorageError, match=r"model\.neff: has 1030 bytes, its header says 1032"):
        warm.warm(Folder(source), target)


#: Copies a cache and is killed when five modules are in place.
DIES_AFTER_5 = """
import itertools, os, sys
from hlatctl.cache.warm import _Copier
from trainer import cache
real, numbers = _Copier.copy, itertools.count(1)
def dies(self, module):
    problem = real(self, module)
    if next(numbers) == 5:
        os.kill(os.getpid(), 9)
    return problem
_Copier.copy = dies
sys.exit(cache.main())
"""


@pytest.mark.processes
def test_warm_up_that_was_killed_continues_where_it_stopped(
    source: Path, target: Path, make_module: MakeModule
) -> None:
    for number in range(150):
        make_module(number, content=b"program" * 2000)
    graphs.write_manifest(source)
    argv = [sys.executable, "-c", DIES_AFTER_5, "--from", os.fspath(source), "--to", os.fspath(target)]
    died = subprocess.run(argv, env={**os.environ, "PYTHONPATH": os.getcwd()}, check=False)
    assert died.returncode == -signal.SIGKILL
    there = {path.parent.name: path.stat().st_mtime_ns for path in target.glob("*/*/model.done")}
    assert 5 <= len(there) < 150
    assert not (target / MANIFEST).exists()
    done = warm.warm(Folder(source), target)
    assert done.copied == 150 - len(there)
    assert tree(target) == tree(source)
    assert all((target / VERSION / name / "model.done").stat().st_mtime_ns == mtime for name, mtime in there.items())


@pytest.mark.processes
def test_of_two_at_once_the_second_copies_nothing(source: Path, target: Path, make_module: MakeModule) -> None:
    for number in range(50):
        make_module(number)
    argv = [sys.executable, "-m", "trainer.cache", "--from", os.fspath(source), "--to", os.fspath(target)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    both = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(int(output.split('"copied": ')[1].split(",")[0]) for output in outputs) == [0, 50]


def test_only_old_locks_that_no_process_holds_are_removed(source: Path, target: Path, make_module: MakeModule) -> None:
    make_module(1)
    old, held, young = (target / VERSION / "MODULE_9" / f"{name}.lock" for name in ("old", "held", "young"))
    old.parent.mkdir(parents=True)
    for lock in (old, held, young):
        lock.touch()
    for lock in (old, held):
        os.utime(lock, (time.time() - 7200,) * 2)
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = warm.warm(Folder(source), target)
    assert done.stale_locks == [old.relative_to(target).as_posix()]
    assert (old.exists(), held.exists(), young.exists()) == (False, True, True)


def test_links_out_of_the_cache_are_not_followed(source: Path, target: Path, make_module: MakeModule) -> None:
    make_module(1)
    linked = make_module(2)
    secret = source.parent / "secret"
    secret.write_text("secret")
    (linked / "model.neff").unlink()
    (linked / "model.neff").symlink_to(secret)
    done = warm.warm(Folder(source), target)
    name = f"{VERSION}/{linked.name}"
    assert done.skipped == [f"{name}: {name}/model.neff: is a symbolic link, which may lead out of the cache"]
    assert b"secret" not in tree(target).values()
    (target / "elsewhere").symlink_to(source.parent)
    with pytest.raises(StorageError, match="elsewhere: is a symbolic link"):
        warm.warm(Folder(source), target)


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", f"{VERSION}/../../outside"])
def test_manifest_that_leads_out_of_its_folder_is_refused(source: Path, target: Path, path: str) -> None:
    source.mkdir()
    graphs.write_entries(source, [{"path": path, "bytes": 0, "sha256": ""}])
    with pytest.raises(StorageError, match="names a file outside its folder"):
        warm.warm(Folder(source), target)


@pytest.mark.parametrize("text", ["{", "[]", '{"files": [{"path": "a/b"}]}', '{"files": 3}'])
def test_unreadable_manifest_is_an_error(source: Path, target: Path, text: str) -> None:
    source.mkdir()
    (source / MANIFEST).write_text(text)
    with pytest.raises(StorageError, match=r"cache_manifest\.json: no readable manifest"):
        warm.warm(Folder(source), target)


def test_stores_without_complete_modules_are_refused(source: Path, target: Path, make_module: MakeModule) -> None:
    with pytest.raises(StorageError, match="no such folder or archive"):
        open_store(os.fspath(source))
    (source / "ab").mkdir(parents=True)
    with pytest.raises(StorageError, match="contains no complete module"):
        warm.warm(Folder(source), target)
    (source / "ab" / "kernel.so").write_bytes(b"\x7fELF")
    with pytest.raises(StorageError, match=r"has no cache_manifest\.json, so the cache is incomplete"):
        warm.warm(Folder(source), target)
    make_module(1, done=False)
    with pytest.raises(
        StorageError, match=r"contains no complete module \(1 incomplete; the first: .*has no model\.done"
    ):
        warm.warm(Folder(source), target)


def test_target_that_can_t_be_written_is_an_error(source: Path, make_module: MakeModule) -> None:
    make_module(1)
    occupied = source.parent / "file"
    occupied.touch()
    with pytest.raises(StorageError, match=r"file/cache.*: can't be written \(Not a directory\)"):
        warm.warm(Folder(source), occupied / "cache")


@pytest.mark.processes
def test_full_disk_is_an_error_and_files_in_place_are_kept(
    source: Path, tmp_path: Path, make_module: MakeModule
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a small disk can only be mounted as root")
    try:
        for number in range(8):
            make_module(number, content=b"program" * 10_000)
        with pytest.raises(StorageError, match=r"can't be written \(No space left on device\)") as error:
            warm.warm(Folder(source), disk / "cache")
        assert "cluster.worker_cache_dir" in error.value.hint
        arrived = list((disk / "cache").glob("*/*/model.done"))
        assert 0 < len(arrived) < 8
        for done in arrived:
            wanted = source / done.relative_to(disk / "cache")
            assert (done.parent / "model.neff").read_bytes() == (wanted.parent / "model.neff").read_bytes()
        assert not list((disk / "cache").glob(".copy/*"))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_url_is_read_through_fsspec(source: Path, target: Path, make_module: MakeModule) -> None:
    fsspec: Any = pytest.importorskip("fsspec", reason="the extra s3 is not installed")
    for number in range(3):
        make_module(number)
    memory = fsspec.filesystem("memory")
    for path, content in tree(source).items():
        memory.pipe(f"/bucket/graphs/{path}", content)
    done = warm.warm(open_store("memory://bucket/graphs"), target)
    assert done.copied == 3
    assert tree(target) == tree(source)
    assert warm.warm(open_store("memory://bucket/graphs/"), target).copied == 0
    with pytest.raises(StorageError, match=r"memory://bucket/none: no such folder, or it is empty"):
        warm.warm(open_store("memory://bucket/none"), target)
    with pytest.raises(StorageError, match="Protocol not known: bogus"):
        open_store("bogus://x")
