"""The wheel, installed apart from the checkout: package data, console script, and packages that are not ours."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; its dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = folder / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=False).stdout
    for name in filter(None, tracked.decode().split("\0")):
        if not name.startswith(("tests/", "docs/", "benchmarks/")) and (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    if not source.exists():
        pytest.skip("no git checkout to build the wheel from")
    build = [*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", os.fspath(folder)]
    subprocess.run([*build, os.fspath(source)], check=True, capture_output=True)
    (wheel,) = folder.glob("hlatctl-*.whl")
    environment = folder / "env"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    install = [*pip, "--python", os.fspath(python), "install", "--no-deps", "--no-index", os.fspath(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    # Python reads no .pth file of a folder that a .pth file names: the editable install of the checkout is not found.
    Path(next(environment.glob("lib/python*/site-packages")), "dependencies.pth").write_text(
        sysconfig.get_path("purelib") + "\n", encoding="utf-8"
    )
    return environment


def hlatctl(installed: Path, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [installed / "bin" / "hlatctl", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**inherited, "NO_COLOR": "1", **variables},
    )


def test_the_installed_command_runs_a_dry_run_outside_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    overrides = ["train.max_steps=20", "eval.enabled=false", "tracking=none"]
    result = hlatctl(installed, tmp_path, "train", "--dry-run", *overrides)
    assert result.returncode == 0, result.stderr
    run = tmp_path / "runs" / result.stdout.split()[-1]
    assert (run / "report" / "index.html").is_file()
    assert os.fspath(REPOSITORY) not in (run / "provenance.json").read_text(encoding="utf-8")


def test_the_installed_command_finds_its_configuration_and_figures(installed: Path, tmp_path: Path) -> None:
    result = hlatctl(installed, tmp_path, "plan", "experiment=hlat_70b")
    assert result.returncode == 0, result.stderr
    assert hlatctl(installed, tmp_path, "--version").returncode == 0


@pytest.mark.parametrize("name", ["conf", "eval"])
def test_a_package_of_another_distribution_is_named_and_not_imported(
    installed: Path, tmp_path: Path, name: str
) -> None:
    other = tmp_path / "elsewhere" / name
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    result = hlatctl(installed, tmp_path, "runs", PYTHONPATH=os.fspath(other.parent))
    assert result.returncode == 17
    assert f"error: package {name}: Python finds {other / '__init__.py'}, which is not hlatctl's" in result.stderr
    assert f"no other package named {name} on PYTHONPATH" in result.stderr
