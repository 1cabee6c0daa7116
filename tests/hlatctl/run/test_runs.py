"""Runs by id, prefix and ``latest``; ids that are refused; folders that can't be written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hlatctl.run import files
from hlatctl.run.errors import ConfigError, RunExistsError, RunNotFoundError, StorageError
from hlatctl.run.runs import check_run_id, create_run, create_sweep, find_run, list_runs, new_run_id


def make(runs_dir: Path, *ids: str) -> None:
    for age, run_id in enumerate(ids):
        run = create_run(runs_dir, run_id, "a: 1\n")
        os.utime(run.config, (age, age))


def test_a_run_is_found_by_id_by_unique_prefix_and_as_the_latest(tmp_path: Path) -> None:
    make(tmp_path, "alpha-1", "beta-2", "alpha-3")
    assert find_run(tmp_path, "alpha-1").run_id == "alpha-1"
    assert find_run(tmp_path, "b").run_id == "beta-2"
    assert find_run(tmp_path, "latest").run_id == "alpha-3"
    assert [run.run_id for run in list_runs(tmp_path)] == ["alpha-1", "beta-2", "alpha-3"]


def test_an_id_that_begins_another_one_means_itself(tmp_path: Path) -> None:
    make(tmp_path, "run", "run-2")
    assert find_run(tmp_path, "run").run_id == "run"


def test_an_unknown_run_gives_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="there is no run in"):
        find_run(tmp_path, "latest")
    make(tmp_path, "quickstart-1", "quickstart-2")
    with pytest.raises(RunNotFoundError, match=r"is the beginning of 2 runs\nhint: one of: quickstart-1, quickstart-2"):
        find_run(tmp_path, "quick")
    with pytest.raises(RunNotFoundError, match=r"no run of that name in .*\nhint: did you mean quickstart-1\?"):
        find_run(tmp_path, "quikstart-1")
    with pytest.raises(RunNotFoundError, match="no run of that name"):
        find_run(tmp_path, "../quickstart-1")


@pytest.mark.parametrize("run_id", ["", ".hidden", "../up", "a/b", "latest", "a b", "-x", "x" * 101, "a\n"])
def test_an_id_that_is_no_plain_folder_name_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ConfigError, match="must be 1 to 100 letters"):
        create_run(tmp_path, run_id, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["mlflow.db", "MLflow.db", "mlflow.db-wal", "nodes.jsonl", "mlartifacts"])
def test_an_id_that_is_the_name_of_a_file_of_ours_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"--run-id={name}: is the name of a file that hlatctl keeps") as caught:
        create_run(tmp_path, name, "")
    check_run_id(caught.value.hint.partition("--run-id=")[2])
    with pytest.raises(ConfigError, match=f"--sweep-id={name}: is the name"):
        create_sweep(tmp_path, name, "")
    assert list(tmp_path.iterdir()) == []


def test_an_id_is_given_once(tmp_path: Path) -> None:
    make(tmp_path, "one")
    with pytest.raises(RunExistsError, match="hlatctl resume one"):
        create_run(tmp_path, "one", "b: 2\n")
    written = find_run(tmp_path, "one").config.read_text(encoding="utf-8")
    assert files.unseal_lines(written) == ("a: 1\n", True)


@pytest.mark.processes
def test_a_run_whose_creation_is_killed_is_not_there_and_can_be_created(tmp_path: Path) -> None:
    code = "import os; from pathlib import Path; from hlatctl.run.runs import create_run\n"
    code += "create_run(Path(sys.argv[1]), 'one', '', begin=lambda run: os._exit(9))"
    assert subprocess.run([sys.executable, "-c", f"import sys; {code}", tmp_path], check=False).returncode == 9
    assert list_runs(tmp_path) == []
    (tmp_path / "one").mkdir()  # by an older version, or by hand
    assert create_run(tmp_path, "one", "a: 1\n", begin=lambda run: run.origins.touch()).origins.exists()
    (left,) = tmp_path.glob(".new-*")
    os.utime(left, (0, 0))
    make(tmp_path, "two")
    assert not left.exists(), "what a killed creation left goes when it is old"


def test_of_two_that_create_a_run_at_once_one_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(RunExistsError, match="hlatctl resume one"):
        create_run(tmp_path, "one", "", begin=lambda _: make(tmp_path, "one"))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".new-")] == []


def test_new_ids_differ_and_are_accepted(tmp_path: Path) -> None:
    ids = {new_run_id("quickstart") for _ in range(5)}
    make(tmp_path, *ids)
    assert len(list_runs(tmp_path)) == len(ids) > 1


def test_a_runs_folder_that_is_a_file_is_an_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("", encoding="utf-8")
    with pytest.raises(StorageError, match=r"hint: choose another with runs_dir="):
        create_run(tmp_path / "runs", "one", "")
    assert list_runs(tmp_path / "runs") == []


@pytest.fixture
def any_umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(*paths: Path) -> list[str]:
    return [oct(path.stat().st_mode & 0o777) for path in paths]


@pytest.mark.parametrize("any_umask", [0, 0o022, 0o077], indirect=True)
@pytest.mark.parametrize(("mode", "file_mode"), [(0o700, "0o600"), (0o750, "0o640"), (0o770, "0o660")])
@pytest.mark.usefixtures("any_umask")
def test_the_files_of_a_run_have_its_mode_regardless_of_the_umask(tmp_path: Path, mode: int, file_mode: str) -> None:
    runs_dir = tmp_path / "new" / "runs"
    run = create_run(runs_dir, "one", "a: 1\n", mode)
    sweep = create_sweep(runs_dir, "two", "a: 1\n", mode)
    assert modes(runs_dir, run.root, sweep.root, runs_dir / ".cache") == [oct(mode)] * 4
    assert modes(run.config, sweep.space) == [file_mode] * 2
    with files.created_like(run.root):
        files.write_json(run.report / "numbers.json", {})
    assert modes(run.report, run.report / "numbers.json") == [oct(mode), file_mode]


def test_a_runs_folder_that_is_there_keeps_its_mode_and_new_runs_in_it_are_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert modes(create_run(tmp_path, "one", "").root, tmp_path) == ["0o700", "0o755"]


def test_files_added_to_a_run_have_its_permissions(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with files.created_like(tmp_path):
        files.write_text(tmp_path / "new", "")
    assert modes(tmp_path / "new") == ["0o644"]


def test_a_run_that_can_not_be_written_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match=r"runs_dir=.*No space left"):
        create_run(tmp_path / "runs", "full", "a: 1\n")
    assert not (tmp_path / "runs" / "full").exists()
