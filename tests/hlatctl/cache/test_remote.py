"""The layout of a remote folder, and what is refused early."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fsspec", reason="no extra for object storage is installed")

from hlatctl.cache import remote
from hlatctl.cache.remote import Copy
from hlatctl.cache.store import Objects
from hlatctl.run.checkpoint import MANIFEST, write_manifest
from hlatctl.run.errors import DependencyError, RunExistsError, StorageError


def _copy(folder: Path, step: int) -> Copy:
    folder.mkdir(parents=True)
    (folder / "shard").write_bytes(b"x" * step)
    return Copy.of(write_manifest(folder, step=step, tokens=step, world={"world_size": 1}))


@pytest.mark.parametrize("url", ["memory://remote-{}", "file://{}"])
def test_only_copies_with_a_manifest_are_complete_and_a_deletion_leaves_nothing(url: str, tmp_path: Path) -> None:
    where = remote.remote_folder(url.format(tmp_path / "bucket"), "run")
    assert remote.all_copies(where) == []
    made = [_copy(tmp_path / f"from-{step}", step) for step in (9, 100_000_000)]
    for copy in made:
        where.put(tmp_path / f"from-{copy.step}" / "shard", f"{copy.name}/shard")
    where.write(b"", "step-7/unknown")
    assert remote.all_copies(where) == made[::-1]
    assert remote.complete_copies(where) == []
    where.put(tmp_path / "from-9" / MANIFEST, made[0].manifest)
    assert remote.complete_copies(where) == [made[0]]
    assert where.sizes(made[0].name)["shard"] == where.size(f"{made[0].name}/shard") == 9
    remote.delete(where, made[0])
    assert where.sizes(made[0].name) == {}
    remote.delete(where, made[0])
    assert remote.all_copies(where) == [made[1]]


def test_two_checkpoints_of_one_step_have_two_names(tmp_path: Path) -> None:
    first, second = _copy(tmp_path / "a", 4), _copy(tmp_path / "b", 4)
    assert first == second
    (tmp_path / "b" / "shard").write_bytes(b"else")
    other = Copy.of(write_manifest(tmp_path / "b", step=4, tokens=4, world={"world_size": 1}))
    assert other.name.startswith("step-00000004-")
    assert other.name != first.name


def test_a_remote_folder_is_tried_and_nothing_is_left_there(tmp_path: Path) -> None:
    remote.check_writable(f"file://{tmp_path}/bucket")
    assert list((tmp_path / "bucket").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"checkpoint.remote_url=file://.*/file: can't be used \(.*\)\nhint: check"):
        remote.check_writable(f"file://{tmp_path}/file")
    with pytest.raises(StorageError, match="Protocol not known: bogus"):
        remote.check_writable("bogus://x")
    with pytest.raises(DependencyError, match=r"needs a package that is not installed(.|\n)*pip install .*\[s3\]"):
        Objects("adl://container/x")


def test_the_id_of_a_run_in_the_remote_folder_is_not_used_again(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    assert remote.main(["--url", url, "--new-run", "old"]) == 0
    copy = _copy(tmp_path / "from", 4)
    remote.remote_folder(url, "old").put(tmp_path / "from" / "shard", f"{copy.name}/shard")
    with pytest.raises(RunExistsError, match=r"--run-id=old(.|\n)*hlatctl checkpoint restore file://.*/bucket/old"):
        remote.main(["--url", url, "--new-run", "old"])
    assert remote.main(["--url", url]) == 0
