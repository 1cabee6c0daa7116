"""``hlatctl`` and ``python -m hlatctl``: check that Python finds this project's packages, then run the command line."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from hlatctl.cli import streams

#: Packages of this project whose names other distributions can also use.
_PACKAGES = ("conf", "flows", "trainer", "eval")
_OWNER = b'OWNER = "hlatctl"'
_DEPENDENCY_ERROR, _INTERRUPTED = 17, 130


def main() -> int:
    """Run the command line and return its exit code."""
    streams.prepare()
    problem = _foreign_package()
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return _DEPENDENCY_ERROR
    try:
        from hlatctl.run import startup

        startup.begin()
        from hlatctl.cli.main import main as run
    except KeyboardInterrupt:  # the imports take most of a second
        return _INTERRUPTED
    return run()


def _foreign_package() -> str:
    """Return an error if another package shadows one of this project's; empty if not. Imports none of them."""
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec else None
        if origin and _OWNER in Path(origin).read_bytes():
            continue
        where = f"Python finds {origin}, which is not hlatctl's" if origin else "Python does not find it"
        alone = f"in a virtual environment of its own, with no other package named {name} on PYTHONPATH"
        return f"package {name}: {where}\nhint: install hlatctl {alone}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
