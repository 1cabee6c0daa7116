"""The error tree, its exit codes, errors that cross processes, nearest names, and failures of file systems."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from hlatctl.run import errors, runs
from hlatctl.run.errors import (
    DISK_FULL,
    ERROR_FILE_ENV,
    OF_STORAGE,
    ConfigError,
    DataError,
    HlatctlError,
    StorageError,
    cannot_write,
    code_of,
    dump_error,
    hint_of,
    install,
    load_error,
    nearest,
    of_system,
    run_main,
    storage_errors,
    suggest,
)


def test_a_driver_in_kubernetes_ends_for_no_code_after_which_one_on_slurm_starts_again() -> None:
    text = (Path(__file__).parents[3] / "deploy" / "kubernetes" / "driver.yaml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"onExitCodes: \{.*values: \[(.*)\]\}", text)
    assert {int(code) for code in listed.split(",")} == {*errors.NO_RESTART} - {13, 130}  # its volume or pod is gone


def test_every_error_has_its_own_documented_exit_code() -> None:
    documented = {name: int(code) for name, code in re.findall(r"(\w+Error) \((\d+)\)", errors.__doc__ or "")}
    assert documented == {name: error.exit_code for name, error in errors.error_types().items()}
    assert len(set(documented.values())) == len(documented)


@pytest.mark.parametrize("error_type", errors.error_types().values())
def test_an_error_crosses_processes_unchanged(tmp_path: Path, error_type: type[HlatctlError]) -> None:
    dump_error(error_type("data.path=/x: é\nnot there", hint="fix it", code=DISK_FULL), tmp_path / "e.json")
    loaded = load_error(tmp_path / "e.json")
    assert type(loaded) is error_type
    assert (loaded.message, loaded.hint, loaded.code) == ("data.path=/x: é\nnot there", "fix it", DISK_FULL)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "worded otherwise"), DISK_FULL),
        (OSError(errno.EDQUOT, "worded otherwise"), DISK_FULL),
        (RuntimeError("I/O error: No space left on device (os error 28)"), DISK_FULL),
        (OSError(errno.EROFS, "Read-only file system"), ""),
    ],
)
def test_a_full_disk_is_recognized_by_its_number_or_by_the_text_of_the_system(error: Exception, code: str) -> None:
    assert code_of(error) == code
    if isinstance(error, OSError):
        assert cannot_write("/runs", error).code == code
        with pytest.raises(StorageError) as caught, storage_errors():
            raise error
        assert caught.value.code == code


@pytest.mark.parametrize("text", ["", "{", "[]", '{"type": "SystemExit", "message": "x", "hint": ""}'])
def test_a_file_without_an_error_loads_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "e.json").write_text(text, encoding="utf-8")
    assert load_error(tmp_path / "e.json") is None
    assert load_error(tmp_path / "missing.json") is None


def test_a_process_prints_its_error_in_two_lines_and_writes_it_for_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise DataError("data.path=/x: no such folder", hint="make it")

    monkeypatch.setenv(ERROR_FILE_ENV, str(tmp_path / "e.json"))
    assert run_main(fail) == DataError.exit_code
    assert capsys.readouterr().err == "error: data.path=/x: no such folder\nhint: make it\n"
    assert isinstance(load_error(tmp_path / "e.json"), DataError)


def test_a_process_writes_no_error_file_unless_its_parent_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise ConfigError("x")

    monkeypatch.delenv(ERROR_FILE_ENV, raising=False)
    assert run_main(fail) == ConfigError.exit_code
    assert run_main(lambda: 0) == 0


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "free space (`df -h`) or quota, then try again"),
        (errno.EACCES, "check the permissions of the folder"),
        (errno.ENOENT, "create the folder that /runs/r is to be in, or name another place"),
        (errno.ENXIO, "repair the storage, or name another place, then try again"),
    ],
)
def test_a_place_that_cant_be_written_has_a_hint_that_fits_the_cause(number: int, hint: str) -> None:
    error = OSError(number, os.strerror(number))
    assert cannot_write("--to=/runs/r", error).hint == hint
    assert cannot_write("--to=/runs/r", error, hint="better").hint == "better"


def test_the_nearest_known_name_is_suggested_before_all_of_them() -> None:
    assert (
        suggest("locl", ["local", "simulated"], prefix="cluster=")
        == "did you mean cluster=local? known: local, simulated"
    )


def test_without_a_near_name_the_known_ones_are_listed() -> None:
    assert suggest("x", ["local", "simulated"]) == "known: local, simulated"
    assert suggest("x", []) == "known: none"


def test_another_hint_takes_the_place_of_the_list() -> None:
    assert suggest("frist-1", ["first-1"], otherwise="`hlatctl runs` lists them") == "did you mean first-1?"
    assert suggest("x", ["first-1"], otherwise="`hlatctl runs` lists them") == "`hlatctl runs` lists them"


def test_a_name_must_be_similar_enough() -> None:
    assert nearest("vocabsize", ["vocab_size", "seq_len"]) == "vocab_size"
    assert nearest("vocabs", ["vocab_size", "seq_len"], similarity=0.9) is None


def denied(path: Path) -> PermissionError:
    return PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        ('{"url": "file:///my%20clone", "dir_info": {"editable": true}}', "pip install -e '/my clone[s3]'"),
        ('{"url": "file:///w/hlatctl.whl", "archive_info": {}}', "pip install '/w/hlatctl.whl[s3]'"),
        (
            '{"url": "ssh://git@host/x.git", "vcs_info": {"vcs": "git"}}',
            "pip install 'hlatctl[s3] @ git+ssh://git@host/x.git'",
        ),
        ('{"url": "https://host/hlatctl.whl"}', "pip install 'hlatctl[s3] @ https://host/hlatctl.whl'"),
        (None, "`pip install '.[s3]'` in a clone of hlatctl, or `make bundle EXTRAS=s3` there"),
        ("damaged", "`pip install '.[s3]'` in a clone of hlatctl, or `make bundle EXTRAS=s3` there"),
    ],
)
def test_an_extra_is_installed_from_where_the_project_was(
    noted: str | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = SimpleNamespace(read_text={}.get)
    found = SimpleNamespace(read_text={"direct_url.json": noted}.get)
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [clone, found])
    assert install("s3") == command


@pytest.mark.parametrize("number", OF_STORAGE, ids=os.strerror)
def test_every_failure_of_storage_has_a_hint(number: int, tmp_path: Path) -> None:
    assert hint_of(OSError(number, os.strerror(number), os.fspath(tmp_path)))
    assert cannot_write(tmp_path, OSError(number, os.strerror(number))).hint, "also without the file's name"
    assert hint_of(RuntimeError(f"I/O error: {os.strerror(number)} (os error {number})")), "of another language"
    assert of_system(OSError(number, os.strerror(number), "x")) is not None


def test_an_error_that_is_not_of_storage_stays_a_bug(tmp_path: Path) -> None:
    assert of_system(FileNotFoundError(errno.ENOENT, "No such file", os.fspath(tmp_path))) is None
    assert of_system(RuntimeError("broken")) is None
    assert hint_of(BrokenPipeError(errno.EPIPE, "pipe")) == ""


def test_the_hint_names_the_closest_folder_that_is_visible_and_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    assert hint_of(denied(tmp_path / "run" / "a" / "b")).startswith(f"{tmp_path}/run is yours; `chmod u+rwX ")
    monkeypatch.setattr("hlatctl.run.errors.os.geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr("hlatctl.run.errors.pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    says = f"{tmp_path}/run belongs to user {os.getuid()}; ask its owner for access, or use a folder of your own"
    assert hint_of(denied(tmp_path / "run" / "a" / "b")) == says


def test_runs_of_other_users_are_left_out_of_lists_and_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "theirs"):
        runs.create_run(tmp_path, name, "a: 1\n")
    runs.create_sweep(tmp_path, "swept", "a: 1\n")
    runs.create_sweep(tmp_path, "foreign", "a: 1\n")
    real = os.stat

    def stat(path: object, *args: object, **kwargs: object) -> os.stat_result:
        if Path(str(path)).parent.name in ("theirs", "foreign"):
            raise denied(Path(str(path)))
        return real(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", stat)
    assert [run.run_id for run in runs.list_runs(tmp_path)] == ["mine"]
    assert [sweep.run_id for sweep in runs.list_sweeps(tmp_path)] == ["swept"]
    with pytest.raises(StorageError, match=r"theirs/config\.yaml: can't be used \(Permission denied\)"):
        runs.find_run(tmp_path, "theirs")
