"""Environments on nodes' own disks: what an archive holds, and that Python runs from the copy alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hlatctl import node
from hlatctl.cache import environment
from hlatctl.cache.environment import Layout, Packer, pack, stage
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, StorageError

LIBRARY = Path(f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages")
_SHOWS = "import json, sys, shared, trainer; print(json.dumps([sys.prefix, shared.__file__, trainer.__file__]))"


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """An environment with a package, and next to it this project's sources, to which pip links."""
    prefix, project = tmp_path / "shared" / "venv", tmp_path / "shared" / "sources"
    venv.create(prefix, symlinks=True)
    (prefix / LIBRARY / "shared.py").write_text("")
    (prefix / LIBRARY / "__editable__.hlatctl-0.1.0.pth").write_text(f"{project}\n")
    (prefix / "bin" / "tool").write_text(f"#!{prefix}/bin/python\nimport sys; print(sys.prefix)\n")
    (prefix / "bin" / "tool").chmod(0o755)
    for package in environment.PACKAGES:
        (project / package).mkdir(parents=True)
        (project / package / "__init__.py").write_text("")
    return Layout(prefix=prefix, base=Path("/usr"), project=project, library=LIBRARY)


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.mark.processes
def test_python_and_scripts_run_from_the_copy_without_the_shared_folder(tmp_path: Path, layout: Layout) -> None:
    record = pack(tmp_path / "archives", layout)
    shutil.rmtree(tmp_path / "shared")
    copy = stage(record, tmp_path / "local")
    prefix, *modules = json.loads(run(copy.python, "-P", "-c", _SHOWS))
    assert prefix == os.fspath(copy.prefix)
    assert all(module.startswith(os.fspath(copy.prefix / LIBRARY)) for module in modules)
    assert run(os.fspath(copy.prefix / "bin" / "tool")).strip() == os.fspath(copy.prefix)


@pytest.mark.processes
def test_a_python_outside_of_the_system_is_copied_too(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, version = tmp_path / "python", LIBRARY.parent.name
    (base / "bin").mkdir(parents=True)
    (base / "lib" / version).mkdir(parents=True)
    (base / "bin" / version).symlink_to(os.path.realpath(sys.executable))
    (base / "lib" / version / "os.py").write_text("")
    own = Layout(prefix=layout.prefix, base=base, project=layout.project, library=LIBRARY)
    copy = stage(pack(tmp_path / "archives", own), tmp_path / "local")
    assert (copy.prefix / "bin" / "python").resolve() == (copy.folder / "base" / "bin" / version).resolve()
    assert f"home = {copy.folder / 'base' / 'bin'}\n" in (copy.prefix / "pyvenv.cfg").read_text()


def test_an_archive_is_made_once_for_the_same_files_and_anew_for_others(tmp_path: Path, layout: Layout) -> None:
    first = pack(tmp_path / "archives", layout)
    made = os.stat(first["archive"]).st_ino
    assert pack(tmp_path / "archives", layout) == first
    assert os.stat(first["archive"]).st_ino == made
    (layout.project / "trainer" / "new.py").write_text("")
    second = pack(tmp_path / "archives", layout)
    assert second["archive"] != first["archive"]
    os.utime(first["archive"], (0, 0))
    pack(tmp_path / "archives", layout)
    assert not Path(first["archive"]).exists()
    assert Path(second["archive"]).exists()


def test_files_that_python_compiles_later_are_no_reason_for_another_archive(tmp_path: Path, layout: Layout) -> None:
    first = pack(tmp_path / "archives", layout)
    (layout.project / "trainer" / "__pycache__").mkdir()
    (layout.project / "trainer" / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"compiled")
    assert pack(tmp_path / "archives", layout) == first


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Layout]:
    """One entry for each search of a whole environment."""
    found: list[Layout] = []
    members = Layout.members

    def noted(self: Layout) -> Iterator[tuple[str, Path]]:
        found.append(self)
        return members(self)

    monkeypatch.setattr(Layout, "members", noted)
    return found


def _wheel(folder: Path, content: str) -> Path:
    """A package of one module. All contents of one length give files of one size."""
    path = folder / "demo-1.0-py3-none-any.whl"
    info = {"METADATA": "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n", "RECORD": "demo/__init__.py,,\n"}
    info["WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("demo/__init__.py", content)
        for name, text in info.items():
            wheel.writestr(f"demo-1.0.dist-info/{name}", text)
    return path


@pytest.mark.processes
def test_a_driver_searches_the_environment_again_only_after_pip_or_an_edit(
    tmp_path: Path, layout: Layout, searches: list[Layout]
) -> None:
    zipfile.ZipFile(_wheel(tmp_path, "old = 1")).extractall(layout.prefix / LIBRARY)
    packer, python = Packer(layout), os.fspath(layout.prefix / "bin" / "python")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)

    def packed(name: str) -> tuple[str, int]:
        """Return a file of the archive, and how often the environment was searched until now."""
        with tarfile.open(packer.pack(tmp_path / "archives")["archive"]) as tar:
            file = tar.extractfile(f"env/{LIBRARY}/{name}")
            assert file
            return file.read().decode(), len(searches)

    assert packed("trainer/__init__.py") == ("", 1)
    assert packed("trainer/__init__.py") == ("", 1)
    (layout.project / "trainer" / "__init__.py").write_text("one")
    assert packed("trainer/__init__.py") == ("one", 2)
    edited = layout.project / "trainer" / "__init__.py"
    edited.write_text("two")
    os.utime(edited, ns=(0, 0))  # whatever the clock's resolution
    assert packed("trainer/__init__.py") == ("two", 3)
    assert packed("demo/__init__.py") == ("old = 1", 3)
    run(*pip, "install", "--no-index", "--no-deps", "--force-reinstall", os.fspath(_wheel(tmp_path, "new = 1")))
    assert packed("demo/__init__.py") == ("new = 1", 4)
    shutil.rmtree(tmp_path / "archives")
    assert packed("demo/__init__.py") == ("new = 1", 5)


def test_a_copy_is_used_again_and_made_anew_when_files_are_missing(tmp_path: Path, layout: Layout) -> None:
    record = pack(tmp_path / "archives", layout)
    first = stage(record, tmp_path / "local")
    made = first.folder.stat().st_ino
    assert stage(record, tmp_path / "local").folder.stat().st_ino == made
    (first.prefix / LIBRARY / "shared.py").unlink()  # as a program that cleans /tmp does
    again = stage(record, tmp_path / "local")
    assert (again.prefix / LIBRARY / "shared.py").is_file()


def test_a_copy_that_no_job_uses_is_removed_after_a_week(tmp_path: Path, layout: Layout) -> None:
    old = stage(pack(tmp_path / "archives", layout), tmp_path / "local")
    (layout.project / "trainer" / "new.py").write_text("")
    record = pack(tmp_path / "archives", layout)
    os.utime(old.folder / "complete.json", (0, 0))
    stage(record, tmp_path / "local")
    assert old.folder.exists(), "a job runs there"
    os.close(old.lock)
    stage(record, tmp_path / "local")
    assert not old.folder.exists()


def test_a_changed_archive_and_folders_of_others_are_refused(tmp_path: Path, layout: Layout) -> None:
    record = pack(tmp_path / "archives", layout)
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(StorageError, match="other users may write there"):
        stage(record, tmp_path / "open")
    os.chmod(record["archive"], 0o666)
    with pytest.raises(StorageError, match="other users may write there"):
        stage(record, tmp_path / "local")
    os.chmod(record["archive"], 0o600)
    with tarfile.open(record["archive"], "w:gz") as tar:
        tar.add(layout.prefix / "pyvenv.cfg", "env/bin/python")
    with pytest.raises(StorageError, match="is not as it was written"):
        stage(record, tmp_path / "local")
    assert not list((tmp_path / "local").glob("[0-9a-f]*"))


@pytest.mark.parametrize("name", ["../outside", "env/../../outside"])
def test_an_archive_writes_nothing_outside_of_its_folder(tmp_path: Path, layout: Layout, name: str) -> None:
    record = pack(tmp_path / "archives", layout)
    with tarfile.open(record["archive"], "w:gz") as tar:
        tar.add(layout.prefix / "pyvenv.cfg", name)
    with pytest.raises(StorageError, match="is not as it was written"):
        stage(record, tmp_path / "local")
    assert not list(tmp_path.rglob("outside"))


def test_packages_outside_of_the_environment_are_refused_before_anything_is_made(
    tmp_path: Path, layout: Layout
) -> None:
    (layout.prefix / LIBRARY / "__editable__.other-1.0.pth").write_text("/home/you/other\n")
    with pytest.raises(ConfigError, match=r"adds packages outside of the environment") as error:
        pack(tmp_path / "archives", layout)
    assert "without `-e`" in error.value.hint
    system = Layout(prefix=Path("/usr"), base=Path("/usr"), project=layout.project, library=LIBRARY)
    with pytest.raises(ConfigError, match="the system's Python"):
        pack(tmp_path / "archives", system)
    assert not (tmp_path / "archives").exists()


@pytest.mark.processes
@pytest.mark.parametrize("damaged", [False, True])
def test_the_nodes_program_runs_the_command_in_the_copy_or_else_in_the_shared_environment(
    tmp_path: Path, layout: Layout, damaged: bool
) -> None:
    record = pack(tmp_path / "archives", layout)
    place = tmp_path / "train.environment"
    files.write_sealed_json(place, {**record, "folder": os.fspath(tmp_path / "local")})
    if damaged:
        Path(record["archive"]).write_bytes(b"")
    command = [sys.executable, "-c", "import sys; print(sys.prefix)"]
    done = subprocess.run(
        [sys.executable, "-m", "hlatctl.node", os.fspath(tmp_path / "train"), "--", *command],
        env={**os.environ, node.ENVIRONMENT_ENV: os.fspath(place), "TMPDIR": os.fspath(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    said, prefix = done.stdout.splitlines()
    assert said.startswith("warning: ") == damaged
    expected = Path(sys.prefix) if damaged else tmp_path / "local" / record["archive_sha256"][:32] / "env"
    assert prefix == os.fspath(expected)


def test_a_copy_keeps_a_disk_that_is_full_in_order(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = pack(tmp_path / "archives", layout)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("tarfile.TarFile.extractall", full)
    with pytest.raises(OSError, match="No space left"):
        stage(record, tmp_path / "local")
    assert [path.name for path in (tmp_path / "local").iterdir()] == [".lock"]
