"""Find the versions of a node's Neuron software (driver, runtime, packages), and check that all nodes have the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

from conf.environment import NEURON_PACKAGES, software_problem
from conf.registries import BACKENDS
from conf.schema import Config
from hlatctl.run.checks import Check
from hlatctl.run.provenance import package_versions

NAME = "Neuron software"
#: The version of the loaded kernel module. ``modinfo`` shows the file's version, which an update may have replaced.
_DRIVER = Path("/sys/module/neuron/version")
#: System packages: the driver, its runtime, collectives and tools.
_SYSTEM_PACKAGES = ("aws-neuronx-dkms", "aws-neuronx-runtime-lib", "aws-neuronx-collectives", "aws-neuronx-tools")
_QUERIES = (
    ("dpkg-query", "--show", "--showformat", "${Package} ${Version}\n"),
    ("rpm", "--query", "--queryformat", "%{NAME} %{VERSION}\n"),
)
_TIMEOUT_S = 30


def installed(driver: Path = _DRIVER) -> dict[str, str]:
    """Return the installed versions by name."""
    versions = {**package_versions(NEURON_PACKAGES), **_system_packages()}
    if driver.is_file():
        versions["driver"] = driver.read_text(encoding="utf-8").strip()
    return versions


def _system_packages() -> dict[str, str]:
    for query in _QUERIES:
        try:
            result = subprocess.run(
                [*query, *_SYSTEM_PACKAGES], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        lines = (line.split() for line in result.stdout.splitlines())  # missing packages are reported on stderr
        return {words[0]: words[1] for words in lines if len(words) == 2 and words[0] in _SYSTEM_PACKAGES}
    return {}


def check(config: Config, versions: dict[str, str]) -> Check:
    """Check that the driver is loaded and that the packages match the backend's stack."""
    problem = software_problem(config, versions)
    if not problem and "torch-neuronx" not in versions:
        problem = f"backend.name={config.backend.name}: the package torch-neuronx is not installed"
    needed = BACKENDS[config.backend.name].package
    if not problem and needed and needed not in versions:
        problem = f"backend.name={config.backend.name}: the package {needed} is not installed"
    if not problem and "driver" not in versions:
        problem = "the driver is not loaded (install aws-neuronx-dkms; lsmod | grep neuron)"
    shows = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return Check.of(NAME, problem, shows, command="pip list | grep -i neuron", values=versions)


def disagreement(by_host: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the problem of each host whose versions differ from most hosts'; empty if all agree.

    Args:
        by_host: each host's versions by name.
    """
    problems: dict[str, str] = {}
    for name in sorted({name for versions in by_host.values() for name in versions}):
        all_versions = [versions.get(name, "none") for versions in by_host.values()]
        usual = max(sorted(set(all_versions)), key=all_versions.count)
        for host, versions in by_host.items():
            if (own := versions.get(name, "none")) != usual:
                problems.setdefault(
                    host, f"{name} {own}: {all_versions.count(usual)} of {len(all_versions)} nodes have {usual}"
                )
    return problems
