"""torchtitan as an engine: its own loop, models, parallelism and checkpoints, under this project's manager.

Everything here plugs in through torchtitan's interfaces; nothing of it is patched, except on a CPU (``cpu``), where it
lacks a few functions. ``TESTED`` are the versions whose interfaces these modules use.
"""

from __future__ import annotations

from importlib import metadata

from hlatctl.run.errors import DependencyError

#: The minor versions that work. The interfaces change from one to the next.
TESTED = ("0.3",)


def require() -> str:
    """Return the version of the installed torchtitan. Raises a DependencyError if there is none, or another one."""
    install = f"pip install 'hlatctl[torchtitan]' && pip install --no-deps torchtitan=={TESTED[-1]}.0"
    try:
        version = metadata.version("torchtitan")
    except metadata.PackageNotFoundError:
        raise DependencyError("backend.name=torchtitan: torchtitan is not installed", hint=install) from None
    if ".".join(version.split(".")[:2]) not in TESTED:
        raise DependencyError(
            f"backend.name=torchtitan: torchtitan {version} is installed, but this hlatctl works with "
            f"{' or '.join(f'{tested}.x' for tested in TESTED)}",
            hint=install,
        )
    return version
