"""Compiled graphs come only from folders that no other user of the machine can fill."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hlatctl.cache import graphs, trust
from hlatctl.cache.graphs import write_manifest
from hlatctl.cache.store import open_store
from hlatctl.cache.warm import warm
from hlatctl.run.errors import StorageError

MakeModule = Callable[..., Path]
_SOMEBODY = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.mark.processes
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_is_refused_and_its_hint_works(
    source: Path, tmp_path: Path, make_module: MakeModule, mode: int
) -> None:
    make_module(1)
    write_manifest(source)
    source.chmod(mode)
    with pytest.raises(StorageError, match="other users may write there") as raised:
        warm(open_store(os.fspath(source)), tmp_path / "own")
    assert not (tmp_path / "own").exists()
    copy = tmp_path / "copy"
    commands = raised.value.hint.split("`")[1].replace("COPY", os.fspath(copy))
    assert os.system(commands) == 0
    assert warm(open_store(os.fspath(copy)), tmp_path / "own").copied == 1
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700


@needs_root
def test_files_of_another_user_are_refused(source: Path, tmp_path: Path, make_module: MakeModule) -> None:
    module = make_module(1)
    write_manifest(source)
    graphs.export_archive(source, tmp_path / "graphs.tar")
    os.chown(tmp_path / "graphs.tar", _SOMEBODY, _SOMEBODY)
    os.chown(module / "model.neff", _SOMEBODY, _SOMEBODY)
    with pytest.raises(StorageError, match=r"graphs.tar: belongs to user 54321, not to you"):
        warm(open_store(os.fspath(tmp_path / "graphs.tar")), tmp_path / "own")
    with pytest.raises(StorageError, match=r"model.neff: can't be read \(it belongs to another user\)"):
        warm(open_store(os.fspath(source)), tmp_path / "own")
    os.chown(source, _SOMEBODY, _SOMEBODY)
    with pytest.raises(StorageError, match=r"shared: belongs to user 54321, not to you"):
        warm(open_store(os.fspath(source)), tmp_path / "own")


@needs_root
def test_a_folder_that_another_user_made_first_is_not_filled(tmp_path: Path) -> None:
    """As in /tmp: everybody may make folders there, so a name says nothing of who made it."""
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o1777)
    (public / "theirs").mkdir()
    os.chown(public / "theirs", _SOMEBODY, _SOMEBODY)
    with pytest.raises(StorageError, match=r"theirs: belongs to user 54321"):
        trust.make_private(public / "theirs" / "cache")
    (public / "link").symlink_to(tmp_path)
    os.lchown(public / "link", _SOMEBODY, _SOMEBODY)
    with pytest.raises(StorageError, match=r"link: belongs to user 54321"):
        trust.make_private(public / "link" / "cache")
    trust.make_private(public / "ours" / "cache")


@pytest.mark.processes
def test_a_folder_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o777)
    with pytest.raises(StorageError, match=r"public: other users may write there \(mode 0777\), and could") as raised:
        trust.make_private(public / "cache")
    assert os.system(raised.value.hint.split("`")[1]) == 0
    trust.make_private(public / "cache")


def test_a_link_of_ours_to_a_folder_of_ours_is_taken(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    trust.make_private(tmp_path / "link" / "cache")
    assert (tmp_path / "disk" / "cache").is_dir()
