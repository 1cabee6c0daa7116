"""Pack hlatctl with everything it needs into one file, which installs on a machine without a network.

``make bundle EXTRAS=head,train PLATFORM=manylinux_2_28_x86_64 PYTHON=3.11`` runs this with its own pip:

    python deploy/bundle/bundle.py --extras head,train --platform manylinux_2_28_x86_64 --python 3.11 --to dist

It writes a folder ``dist/NAME``. ``bundle.tar`` has the wheels, ``requirements.txt`` with the SHA-256 of each, and
``install.sh``. ``hlatctl`` runs from that one file on shared storage (``deploy/bundle/local.sh``). The same inputs give
the same bytes: this project's files, ``constraints.txt`` and what the package index has.

Wheels come from where pip's own settings point, and so does the build of torch: PyPI has CUDA's, and the variable
``PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`` adds one with the CPU's. Standard library and pip only.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

try:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name, parse_wheel_filename
    from packaging.version import Version
except ModuleNotFoundError:  # A Python with nothing installed: pip, which this needs anyhow, has a copy.
    from pip._vendor.packaging.requirements import InvalidRequirement, Requirement  # type: ignore[assignment]
    from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename  # type: ignore[assignment]
    from pip._vendor.packaging.version import Version  # type: ignore[assignment]

TOP = Path(__file__).parents[2]
HERE = Path(__file__).parent
#: Packages without wheels on PyPI. All are pure Python, so a wheel that is built here fits every platform.
SOURCE_ONLY = ("antlr4-python3-runtime", "rouge-score", "sqlitedict", "word2number")
#: Installs the wheels on the target, so that it needs no pip of its own, nor Debian's python3-venv.
PIP = "pip==26.3"
#: Installed without what they ask for: torchtitan 0.3 asks for datasets<4.8, and works with those of evaluation.
WITHOUT_DEPENDENCIES = ("torchtitan",)
_PLATFORM = re.compile(r"manylinux_2_(\d+)_(x86_64|aarch64)")
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


class BundleError(Exception):
    """What is wrong, and after a line break ``hint:``."""


@dataclass(frozen=True)
class Target:
    """The machine that a bundle is for.

    Args:
        platform: as in names of wheels, such as ``manylinux_2_28_x86_64``: glibc 2.28 or newer.
        python: such as ``3.11``.
    """

    platform: str
    python: str

    def __post_init__(self) -> None:
        if not _PLATFORM.fullmatch(self.platform):
            raise BundleError(
                f"PLATFORM={self.platform}: must be manylinux_2_MINOR_x86_64 or manylinux_2_MINOR_aarch64\n"
                "hint: `ldd --version | head -1; uname -m` on the target; glibc 2.28 on x86_64 is manylinux_2_28_x86_64"
            )
        if not re.fullmatch(r"3\.\d+", self.python):
            raise BundleError(f"PYTHON={self.python}: must be like 3.11\nhint: `python3 --version` on the target")

    @property
    def machine(self) -> str:
        """``x86_64`` or ``aarch64``."""
        return _parts(self.platform)[1]

    @property
    def tag(self) -> str:
        """Such as ``cp311``."""
        return f"cp{self.python.replace('.', '')}"

    @property
    def platforms(self) -> list[str]:
        """The platforms whose wheels run there, the newest first."""
        glibc, machine = _parts(self.platform)
        names = [f"manylinux_2_{minor}_{machine}" for minor in range(int(glibc), 4, -1)]
        return [
            *names,
            *(f"{old}_{machine}" for minor, old in _OLD_NAMES.items() if minor <= int(glibc)),
            f"linux_{machine}",
        ]

    @property
    def environments(self) -> list[dict[str, str]]:
        """What the markers of requirements compare: for the first and the last patch release of this Python."""
        common = {
            "implementation_name": "cpython",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "platform_python_implementation": "CPython",
            "python_version": self.python,
            "sys_platform": "linux",
        }
        releases = (f"{self.python}.0", f"{self.python}.99")
        return [{**common, "python_full_version": one, "implementation_version": one} for one in releases]


def _parts(platform: str) -> tuple[str, str]:
    found = _PLATFORM.fullmatch(platform)
    assert found
    return found[1], found[2]


@dataclass(frozen=True)
class Wheel:
    """A wheel with what it asks for."""

    path: Path
    name: str
    version: str
    requires: tuple[Requirement, ...]
    files: int
    size_bytes: int

    @classmethod
    def read(cls, path: Path) -> Wheel:
        """Return a file's content.

        Raises:
            BundleError: it is not a wheel.
        """
        try:
            name, version, _, _ = parse_wheel_filename(path.name)
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
                inside = next(one for one in members if re.fullmatch(r"[^/]+\.dist-info/METADATA", one.filename))
                metadata = email.message_from_bytes(archive.read(inside))
            requires = tuple(Requirement(text) for text in metadata.get_all("Requires-Dist", []))
        except (ValueError, StopIteration, zipfile.BadZipFile, InvalidRequirement) as error:
            raise BundleError(
                f"{path.name}: is not a wheel ({error})\nhint: remove it from pip's cache or index"
            ) from None
        names = {one.filename.rstrip("/") for one in members}
        inodes = names | {str(parent) for one in names for parent in Path(one).parents}
        return cls(path, name, str(version), requires, len(inodes), sum(one.file_size for one in members))

    def wants(self, extras: Iterable[str], target: Target) -> Iterator[Requirement]:
        """Yield what it asks for on a machine, with some of its extras."""
        places = [{**place, "extra": extra} for place in target.environments for extra in ("", *extras)]
        yield from (one for one in self.requires if one.marker is None or any(map(one.marker.evaluate, places)))


def needed(wheels: dict[str, Wheel], root: str, extras: Sequence[str], target: Target) -> tuple[list[Wheel], list[str]]:
    """Return the wheels that a package needs on a machine, and the requirements that no wheel satisfies.

    pip reads the markers of requirements (``python_version < "3.12"``) for the Python that runs it, not for the target.
    """
    found: dict[str, set[str]] = {}
    missing: dict[str, None] = {}
    todo: list[tuple[str, set[str]]] = [(root, set(extras))]
    while todo:
        name, asked = todo.pop()
        known = found.setdefault(name, set())
        new = asked - known
        if known and not new:
            continue
        known |= {*new, ""}
        if name in WITHOUT_DEPENDENCIES:
            continue
        for one in wheels[name].wants(known - {""}, target):
            other = canonicalize_name(one.name)
            if other in wheels and one.specifier.contains(Version(wheels[other].version), prereleases=True):
                todo.append((other, set(one.extras)))
            else:
                missing[f"{one.name}{one.specifier}"] = None
    return sorted((wheels[name] for name in found), key=lambda wheel: wheel.name), list(missing)


def download(extras: Sequence[str], target: Target, folder: Path, work: Path) -> list[Wheel]:
    """Fetch the wheels of this project and its dependencies into a folder.

    Raises:
        BundleError: a package has no wheel for the target, or the index can't be reached.
    """
    if unknown := set(extras) - set(_extras()):
        raise BundleError(f"EXTRAS={','.join(sorted(unknown))}: no such extra\nhint: {', '.join(_extras())}")
    sources, ours = work / "sources", work / "ours"
    constrained = ["--constraint", str(TOP / "constraints.txt")]
    pip("wheel", "--no-deps", "--wheel-dir", str(ours), str(_copied(work / "hlatctl")))
    (wheel,) = (Wheel.read(path) for path in ours.glob("*.whl"))
    pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(work), PIP)
    pip("wheel", "--no-deps", "--wheel-dir", str(sources), *constrained, *SOURCE_ONLY)
    where = [
        "--find-links",
        str(sources),
        "--only-binary=:all:",
        "--implementation=cp",
        f"--python-version={target.python}",
    ]
    where += [f"--abi={abi}" for abi in (target.tag, "abi3", "none")] + [
        f"--platform={one}" for one in target.platforms
    ]
    fetch = ("download", "--dest", str(folder), *constrained, *where)
    asked = f"{wheel.path}[{','.join(extras)}]" if extras else str(wheel.path)
    separate = [name for name in WITHOUT_DEPENDENCIES if name in extras]
    if separate:
        pip(*fetch, "--no-deps", *separate)
    pip(*fetch, asked)
    tried: set[str] = set()
    while True:
        wheels = {found.name: found for found in map(Wheel.read, sorted(folder.glob("*.whl")))}
        keep, missing = needed(wheels, wheel.name, extras, target)
        if not missing:
            break
        if tried & set(missing):
            raise BundleError(f"{', '.join(missing)}: no wheel fits the others\nhint: see constraints.txt")
        pip(*fetch, "--no-deps", *missing)
        tried |= set(missing)
    keep += [wheels[name] for name in separate]
    for unneeded in {found.path for found in wheels.values()} - {found.path for found in keep}:
        unneeded.unlink()
    return sorted(keep, key=lambda found: found.name)


def _copied(folder: Path) -> Path:
    """Copy what the wheel is made from: a build in the clone would add files that an earlier build left there."""
    for package in ("conf", "eval", "flows", "hlatctl", "trainer"):
        shutil.copytree(TOP / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(TOP / file, folder)
    return folder


def pip(*words: str) -> None:
    """Run pip.

    Raises:
        BundleError: it failed; names the package without a wheel if that is why.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "315532800"}  # 1980, the first time that a zip file can have
    said = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.strip())
            if line.startswith(("Collecting", "Saved")):
                print(line.strip(), file=sys.stderr)
    if not process.returncode:
        return
    lines = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    absent = next(
        (found[1] for line in lines if (found := re.match("No matching distribution found for (.+)", line))), ""
    )
    if absent:
        raise BundleError(
            f"{absent.split(' ')[0]}: pip finds no wheel for this platform and Python\n"
            "hint: choose another PYTHON or PLATFORM, name an index that has it (INDEX=URL), or add a package "
            f"that is pure Python to SOURCE_ONLY in {Path(__file__).name}"
        )
    last = (lines or said or ["it printed nothing"])[-1]
    raise BundleError(
        f"pip {words[0]} failed: {last}\nhint: run again with a package index within reach: `pip config list`"
    )


def write(wheels: Sequence[Wheel], extras: Sequence[str], target: Target, to: Path, work: Path) -> Path:
    """Write the folder of a bundle, and return its archive. The same wheels give the same bytes.

    Args:
        work: folder with pip's wheel.
    """
    ours = next(wheel for wheel in wheels if wheel.name == "hlatctl")
    torch = next((f"-torch{wheel.version}" for wheel in wheels if wheel.name == "torch"), "")
    name = f"hlatctl-{ours.version}-{'+'.join(extras) or 'base'}{torch}-{target.tag}-{target.platform}"
    (installer,) = work.glob("pip-*.whl")
    needed_bytes = sum(wheel.size_bytes for wheel in wheels)
    requirements = "".join(f"{wheel.name}=={wheel.version} --hash=sha256:{_sha256(wheel.path)}\n" for wheel in wheels)
    values = {
        "NAME": name,
        "PYTHON": target.python,
        "MACHINE": target.machine,
        "GLIBC": _parts(target.platform)[0],
        "NEEDED_KIB": str(needed_bytes // 2**10),
        "NEEDED_MIB": str(needed_bytes // 2**20),
        "NEEDED_FILES": str(sum(wheel.files for wheel in wheels)),
        "REQUIREMENTS_SHA256": hashlib.sha256(requirements.encode()).hexdigest(),
        "PIP": installer.name,
        "PIP_SHA256": _sha256(installer),
    }
    (work / "requirements.txt").write_text(requirements, encoding="utf-8")
    (work / "install.sh").write_text(_filled("install.sh", values), encoding="utf-8")
    folder = work / name
    folder.mkdir()
    with tarfile.open(folder / "bundle.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        _add(tar, work / "install.sh", f"{name}/install.sh", 0o755)
        for path in (work / "requirements.txt", installer):
            _add(tar, path, f"{name}/{path.name}", 0o644)
        for wheel in wheels:
            _add(tar, wheel.path, f"{name}/wheels/{wheel.path.name}", 0o644)
    program = folder / "hlatctl"
    program.write_text(
        _filled("local.sh", {**values, "ARCHIVE_SHA256": _sha256(folder / "bundle.tar")}), encoding="utf-8"
    )
    program.chmod(0o755)
    (folder / "hlatctl-python").symlink_to("hlatctl")
    shutil.rmtree(to / name, ignore_errors=True)
    to.mkdir(parents=True, exist_ok=True)
    shutil.move(folder, to / name)
    return to / name / "bundle.tar"


def _add(tar: tarfile.TarFile, path: Path, name: str, mode: int) -> None:
    member = tar.gettarinfo(path, name)
    member.mtime, member.mode, member.uid, member.gid, member.uname, member.gname = 0, mode, 0, 0, "", ""
    with path.open("rb") as file:
        tar.addfile(member, file)


def _filled(script: str, values: dict[str, str]) -> str:
    return re.sub(r"@([A-Z0-9_]+)@", lambda found: values[found[1]], (HERE / script).read_text(encoding="utf-8"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _extras() -> list[str]:
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return sorted(project["optional-dependencies"])


def main(argv: Sequence[str] | None = None) -> int:
    """Make a bundle and print its path on stdout; sizes go to stderr."""
    parser = argparse.ArgumentParser(description="Pack hlatctl and its dependencies into one file.")
    parser.add_argument("--extras", default="all,torchtitan", help="comma-separated; empty: the command line only")
    parser.add_argument(
        "--platform", default="", help="such as manylinux_2_28_x86_64; empty: this machine's, glibc 2.28"
    )
    parser.add_argument("--python", default="", help="version on the target, such as 3.11; empty: this one's")
    parser.add_argument("--to", type=Path, default=Path("dist"), help="folder for the archive")
    options = parser.parse_args(argv)
    extras = [one.strip() for one in options.extras.split(",") if one.strip()]
    try:
        target = Target(
            options.platform or f"manylinux_2_28_{os.uname().machine}",
            options.python or f"{sys.version_info[0]}.{sys.version_info[1]}",
        )
        with tempfile.TemporaryDirectory(prefix="hlatctl-bundle-") as text:
            work = Path(text)
            wheels = download(extras, target, work / "wheels", work)
            archive = write(wheels, extras, target, options.to, work)
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    largest = sorted(wheels, key=lambda wheel: -wheel.size_bytes)[:3]
    packed, installed = archive.stat().st_size, sum(wheel.size_bytes for wheel in wheels)
    print(
        f"{len(wheels)} wheels, {packed / 2**20:,.0f} MiB; installed: {sum(wheel.files for wheel in wheels):,} files, "
        f"{installed / 2**20:,.0f} MiB\nlargest: "
        + ", ".join(f"{wheel.name} {wheel.size_bytes / 2**20:,.0f} MiB" for wheel in largest),
        file=sys.stderr,
    )
    print(archive)
    return 0


if __name__ == "__main__":
    sys.exit(main())
