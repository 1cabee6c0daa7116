"""Bundles: made for another platform from small wheels, the same bytes each time, installed without a network."""

from __future__ import annotations

import ensurepip
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from deploy.bundle import bundle
from deploy.bundle.bundle import SOURCE_ONLY, TOP, WITHOUT_DEPENDENCIES, BundleError, Target, Wheel

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
HERE = Target(f"manylinux_2_17_{platform.machine()}", PYTHON)
BUNDLED_PIP = next(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"))
#: Without a route, as a user whom the machine doesn't know.
ALONE = ("unshare", "--user", "--map-user=4321", "--net")


def wheel(folder: Path, name: str, version: str, *requires: str, tag: str = "py3-none-any", extras: str = "") -> None:
    """Write a wheel with one module that says its version."""
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Provides-Extra: {extra}" for extra in extras.split()] + [f"Requires-Dist: {one}" for one in requires]
    texts = {
        f"{name}.py": f"VERSION = '{version}'\n",
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    texts[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*texts, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as archive:
        for inside, text in texts.items():
            archive.writestr(zipfile.ZipInfo(inside), text)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that pip takes for its only index, and a small project in place of this one."""
    project, index = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("index")
    for package in ("conf", "eval", "flows", "hlatctl", "trainer"):
        (project / package).mkdir()
        (project / package / "__init__.py").write_text("")
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "hlatctl"\nversion = "1.0"\ndependencies = ["small>=1", "old; python_version < \'3.10\'"]\n'
        '[project.optional-dependencies]\nhead = ["big[fast]"]\nall = ["hlatctl[head]"]\n'
        '[tool.setuptools]\npackages = ["conf", "eval", "flows", "hlatctl", "trainer"]\n'
    )
    for file in ("README.md", "LICENSE"):
        (project / file).write_text("")
    (project / "constraints.txt").write_text("small==1.5\n")
    wheel(index, "small", "1.5")
    wheel(index, "small", "1.6")
    wheel(index, "big", "3.0", "quick; extra == 'fast'", "newest; python_version >= '3.99'", extras="fast")
    wheel(index, "quick", "1.0", tag=f"{HERE.tag}-{HERE.tag}-manylinux2014_{HERE.machine}")
    wheel(index, "newest", "2.0")
    wheel(index, "source", "1.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "TOP", project)
        patch.setattr(bundle, "SOURCE_ONLY", ("source",))
        patch.setattr(bundle, "PIP", f"pip=={BUNDLED_PIP.name.split('-')[1]}")
        for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "NO_BUILD_ISOLATION": "0"}.items():
            patch.setenv(f"PIP_{name}", value)
        patch.setenv("PIP_FIND_LINKS", f"{index} {BUNDLED_PIP.parent}")
        yield index


@pytest.fixture(scope="module")
def archive(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for this machine."""
    return made(tmp_path_factory.mktemp("shared"), "--extras", "all", "--platform", HERE.platform)


def made(to: Path, *words: str) -> Path:
    assert bundle.main(["--to", str(to), *words]) == 0
    (archive,) = to.glob("*/bundle.tar")
    return archive


def run(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(words, env=environment, check=False, capture_output=True, text=True)


@pytest.mark.processes
def test_a_bundle_installs_without_a_network_and_refuses_altered_files(archive: Path, tmp_path: Path) -> None:
    if run(*ALONE, "true").returncode:
        pytest.skip("this machine gives no network namespaces")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "there", filter="data")
    (top,) = (tmp_path / "there").iterdir()
    packages = re.findall(r"^(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}$", (top / "requirements.txt").read_text(), re.M)
    assert packages == [("big", "3.0"), ("hlatctl", "1.0"), ("quick", "1.0"), ("small", "1.5")]

    place = tmp_path / "env"
    # Variables that would lead to an index or to other wheels are not read.
    more = {"PYTHON": sys.executable, "PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "/"}
    done = run(*ALONE, "sh", top / "install.sh", place, **more)
    assert done.returncode == 0, done.stderr
    inodes = sum(1 for _ in place.rglob("*")) + 1
    assert f"hlatctl is in {place}: {inodes} files and folders" in done.stderr
    shown = run(place / "bin" / "python", "-c", "import big, quick, small, hlatctl; print(small.VERSION)")
    assert shown.stdout == "1.5\n", shown.stderr
    assert "exists already" in run("sh", top / "install.sh", place, **more).stderr

    other = tmp_path / "other"
    for file in (next(top.glob("wheels/big-*")), top / "requirements.txt", next(top.glob("pip-*.whl"))):
        before = file.read_bytes()
        file.write_bytes(before + b" ")
        refused = run("sh", top / "install.sh", other, **more)
        assert refused.returncode
        assert file.name in refused.stderr
        assert "hint: " in refused.stderr
        assert not other.exists()
        file.write_bytes(before)
    assert "is not on this machine" in run("sh", top / "install.sh", other, PYTHON="/nowhere/python").stderr


def test_the_same_wheels_give_the_same_bytes(index: Path, tmp_path: Path) -> None:
    shutil.copy(BUNDLED_PIP, tmp_path)
    wheel(tmp_path, "hlatctl", "1.0")
    wheels = [Wheel.read(tmp_path / "hlatctl-1.0-py3-none-any.whl")]
    first, second = (bundle.write(wheels, ["all"], HERE, tmp_path / name, tmp_path) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    assert first.parent.name == f"hlatctl-1.0-all-{HERE.tag}-{HERE.platform}"


@pytest.mark.processes
def test_a_bundle_runs_from_one_file_on_shared_storage(archive: Path, tmp_path: Path) -> None:
    folder, disk = archive.parent, tmp_path / "disk"
    assert sorted(path.name for path in folder.iterdir()) == ["bundle.tar", "hlatctl", "hlatctl-python"]
    local = {"PYTHON": sys.executable, "HLATCTL_LOCAL_DIR": str(disk)}
    code = "import os, sys, small; print(sys.prefix, small.VERSION, os.environ['HLATCTL_PYTHON'])"
    words = (folder / "hlatctl-python", "-c", code)
    with ExitStack() as stack:
        both = [
            stack.enter_context(
                subprocess.Popen(
                    words,
                    env={"PATH": os.environ["PATH"], **local},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(2)
        ]
        said = [process.communicate() for process in both]
    again = run(*words, **local)
    (env,) = (path for path in disk.glob("hlatctl-*/*") if path.is_dir())
    assert {out for out, _ in said} == {again.stdout} == {f"{env} 1.5 {folder / 'hlatctl-python'}\n"}, said
    assert sum("installing on the disk" in err for _, err in said) == 1
    assert again.stderr == ""

    altered = shutil.copytree(folder, tmp_path / "altered", symlinks=True)
    with (altered / "bundle.tar").open("ab") as file:
        file.write(b" ")
    assert "was altered" in run(altered / "hlatctl", HLATCTL_LOCAL_DIR=str(tmp_path / "other")).stderr
    env.parent.chmod(0o777)
    assert "another user owns it or may write to it" in run(*words, **local).stderr


def test_the_markers_are_those_of_the_target(index: Path, tmp_path: Path) -> None:
    there = Target("manylinux_2_28_aarch64", "3.99")
    wheel(tmp_path, "hlatctl", "1.0", "big[fast]; extra == 'head'", "hlatctl[head]; extra == 'all'")
    files = {
        path.stem: Wheel.read(path) for path in (*index.iterdir(), *tmp_path.iterdir()) if "newest" not in path.name
    }
    wheels = {file.name: file for file in files.values()}
    keep, missing = bundle.needed(wheels, "hlatctl", ["all"], there)
    assert ([file.name for file in keep], missing) == (["big", "hlatctl", "quick"], ["newest"])
    here, missing = bundle.needed(wheels, "hlatctl", ["all"], HERE)
    assert (here, missing) == (keep, [])


@pytest.mark.processes
def test_a_package_without_a_wheel_is_named(index: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="absent: pip finds no wheel for this platform and Python\nhint: "):
        bundle.pip("download", "--no-deps", "--dest", str(tmp_path), "absent")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--platform", "win_amd64"), "PLATFORM=win_amd64: must be manylinux_2_MINOR"),
        (("--python", "2.7"), "PYTHON=2.7: must be like 3.11"),
        (("--extras", "heads"), "EXTRAS=heads: no such extra\nhint: "),
    ],
)
def test_what_is_asked_for_is_checked_first(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bundle.main(["--to", "/nowhere", *words]) == 1
    assert f"error: {says}" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize("target", ["bundle", "image"])
def test_no_process_has_the_password_of_an_index_among_its_arguments(tmp_path: Path, target: str) -> None:
    shown = tmp_path / "shown"
    for name in ("python", "builder"):
        (tmp_path / name).write_text(
            f'#!/bin/sh\necho "$PIP_EXTRA_INDEX_URL" >>{shown}\ntr "\\0" " " </proc/$PPID/cmdline >>{shown}\n'
            f'echo "$0 $@" >>{shown}\n'
        )
        (tmp_path / name).chmod(0o755)
    index = "https://me:secret@index.example/simple"
    words = ("make", target, f"PYTHON={tmp_path / 'python'}", f"BUILDER={tmp_path / 'builder'}", "IMAGE=cuda")
    env = {**os.environ, "INDEX": index, "PIP_EXTRA_INDEX_URL": "https://mine.example"}
    subprocess.run(words, cwd=TOP, env=env, check=True, capture_output=True)
    asked, *arguments = shown.read_text().splitlines()
    assert asked == f"https://mine.example {index}"
    assert arguments
    assert "secret" not in " ".join(line for line in arguments if line != asked)


def test_the_platform_covers_all_older_ones() -> None:
    platforms = Target("manylinux_2_17_x86_64", "3.12").platforms
    assert platforms[0] == "manylinux_2_17_x86_64"
    assert {"manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64"} < set(platforms)
    assert "manylinux_2_18_x86_64" not in platforms


def test_packages_that_are_built_here_are_pinned() -> None:
    pinned = (TOP / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    assert all(f"\n{name}==" in pinned for name in (*SOURCE_ONLY, *WITHOUT_DEPENDENCIES))
