"""The mirrors, checks of ``tracking.mirrors`` and ``notify.urls`` on this machine, and how many steps mirrors get.

The packages of mirrors are checked without importing them. Notifications go to ``env:NAME`` or ``file:PATH``, which
contain an Apprise URL. Such a URL contains a token, so it is in no configuration, and errors never repeat it.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from conf.schema import Config
from hlatctl.run.errors import ConfigError, DependencyError, install
from hlatctl.run.files import open_regular, read_text, why
from hlatctl.run.registry import Registry, Row

_WANDB_URL = "https://api.wandb.ai"
#: Variables of wandb that contain or name a credential.
_WANDB_CREDENTIALS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def _check_wandb(config: Config) -> None:
    if config.tracking.wandb_mode == "online" and not _has_credential():
        raise ConfigError(
            "tracking.mirrors contains wandb: Weights & Biases needs an API key, and there is none here",
            hint="`export WANDB_API_KEY=KEY`, or `wandb login`, or tracking.wandb_mode=offline",
        )


@dataclass(frozen=True, kw_only=True)
class MirrorKind(Row):
    """A mirror: ``code(run, config)`` returns a ``flows.tracking.mirrors.base.Service``.

    Args:
        title: display name of the service.
        package: a package that must be installed; an extra of hlatctl has its name.
        check: raises a HlatctlError if runs can't be copied from this machine.
        chosen_by: the key that chooses it.
        shows_sweeps: the service shows sweeps too.
    """

    title: str
    package: str = ""
    check: Callable[[Config], None] | None = None
    chosen_by: Literal["tracking.mirrors", "tracking.enabled"] = "tracking.mirrors"
    shows_sweeps: bool = False


_MODULES = "flows.tracking.mirrors"
MIRRORS = Registry(
    "tracking.mirrors",
    "hlatctl.mirrors",
    MirrorKind,
    {
        "mlflow": MirrorKind(
            code=f"{_MODULES}.mlflow_run:Mlflow", title="MLflow", chosen_by="tracking.enabled", shows_sweeps=True
        ),
        "tensorboard": MirrorKind(
            code=f"{_MODULES}.tensorboard_files:TensorBoard", title="TensorBoard", package="tensorboard"
        ),
        "wandb": MirrorKind(
            code=f"{_MODULES}.wandb_run:Wandb", title="Weights & Biases", package="wandb", check=_check_wandb
        ),
    },
)


def mirrors_of(config: Config, *, with_default: bool = False) -> list[str]:
    """Return the names of the mirrors to which a run is copied.

    Args:
        with_default: include MLflow although the run didn't ask for it, because a person does now.
    """
    defaults = [name for name, kind in MIRRORS.built_in.items() if kind.chosen_by == "tracking.enabled"]
    return [*(defaults if config.tracking.enabled or with_default else []), *config.tracking.mirrors]


def mirror_entries(config: Config) -> Iterator[ConfigError]:
    """Yield the errors of ``tracking.mirrors``; a rule of ``conf.validate``."""
    names = config.tracking.mirrors
    for index, name in enumerate(names):
        key = f"tracking.mirrors[{index}]"
        if name in names[:index]:
            yield ConfigError(f"{key}={name}: is listed twice", hint="list it once")
        elif name not in MIRRORS:
            yield MIRRORS.unknown(name, key)
        elif (by := MIRRORS[name].chosen_by) != "tracking.mirrors":
            yield ConfigError(f"{key}={name}: {by} chooses it", hint=f"set {by}=true, and remove it here")


def check_mirrors(config: Config) -> None:
    """Check that the packages of the mirrors are installed, and that wandb has a credential if it is online.

    Raises:
        DependencyError: a package is missing.
        ConfigError: there is no credential.
    """
    for name in config.tracking.mirrors:
        kind = MIRRORS[name]
        spec = find_spec(kind.package) if kind.package else None
        # A folder of that name in the working directory has no origin.
        if kind.package and (spec is None or not spec.has_location):
            raise DependencyError(
                f"tracking.mirrors contains {name}: the package {kind.package} is not installed",
                hint=f"{install(kind.package)}, or tracking.mirrors=[]",
            )
        if kind.check:
            kind.check(config)


def _has_credential() -> bool:
    """Return whether a variable or the netrc file, to which `wandb login` writes, has one for W&B's host."""
    if any(os.environ.get(name) for name in _WANDB_CREDENTIALS):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or _WANDB_URL).hostname or ""
    named = os.environ.get("NETRC")
    files = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    return any(_machine_in(path.expanduser(), host) for path in files)


def _machine_in(path: Path, host: str) -> bool:
    try:
        words = read_text(path).split()
    except (OSError, ValueError):
        return False
    return ("machine", host) in pairwise(words)


#: MLflow takes 0.1 ms of processor time for each of a step's ten values, and a chart shows at most 2,500 points.
MOST_STEPS = 100_000
#: MLflow gets all steps up to this one, because people look at each step when a run begins.
FIRST_STEPS = 1_000


def every_steps(total_steps: int) -> int:
    """Return the interval in steps between the steps that MLflow gets.

    It is a power of two, so that a later copy of an extended run has some of the same steps.
    """
    return 1 << max(0, math.ceil(math.log2(max(1, total_steps) / MOST_STEPS)))


def copied_steps(total_steps: int) -> int:
    """Return the total number of a run's steps that MLflow gets."""
    every, first = every_steps(total_steps), min(FIRST_STEPS, total_steps)
    later = total_steps // every - first // every
    return first + later + (total_steps > first and total_steps % every != 0)


_ENV, _FILE = "env:", "file:"
_ENTRY = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:~?/[^\s,]+")
_MAX_BYTES = 4096
_HOW = "notify.urls=[env:NAME] reads the variable NAME, notify.urls=[file:/PATH] a file of mode 600"


def check_notify_override(key: str, value: str) -> None:
    """Refuse an override of ``notify.urls`` that contains anything except entries.

    Raises:
        ConfigError: names only the key.
    """
    if key == "notify.urls" or key.startswith(("notify.urls.", "notify.urls[")):
        for entry in value.strip("[] ").split(","):
            if word := entry.strip("[]'\" "):
                check_entry(key, word)


def check_entry(key: str, entry: str) -> None:
    """Refuse an entry other than ``env:NAME`` or ``file:PATH``.

    Raises:
        ConfigError: names only the key, because the value may be a secret.
    """
    if not _ENTRY.fullmatch(entry):
        raise ConfigError(
            f"{key}: must be env:NAME or file:/PATH; the URL of a service contains a secret, and the value would be "
            "written into config.yaml",
            hint=_HOW,
        )


def notify_entries(config: Config) -> Iterator[ConfigError]:
    """Yield the errors of ``notify.urls``; a rule of ``conf.validate``."""
    for index, entry in enumerate(config.notify.urls):
        key = f"notify.urls[{index}]"
        try:
            check_entry(key, entry)
        except ConfigError as error:
            yield error
        if entry in config.notify.urls[:index]:
            yield ConfigError(f"{key}={entry}: is listed twice", hint="list it once")


def check_notify_urls(config: Config) -> None:
    """Check that every entry can be read on this machine.

    Raises:
        ConfigError: a variable is not set, or a file can't be used.
    """
    for index, entry in enumerate(config.notify.urls):
        try:
            resolve_notify_url(entry)
        except ConfigError as error:
            raise ConfigError(f"notify.urls[{index}]={error.message}", hint=error.hint) from None


def resolve_notify_url(entry: str) -> str:
    """Return the Apprise URL that an entry names.

    Raises:
        ConfigError: the variable is not set or empty; the file is missing, has another owner, or is readable by others.
    """
    if entry.startswith(_ENV):
        url = os.environ.get(entry.removeprefix(_ENV), "").strip()
        if not url:
            name = entry.removeprefix(_ENV)
            raise ConfigError(f"{entry}: the variable is not set", hint=f"`export {name}=URL` before you start the run")
    else:
        url = _read(entry, Path(entry.removeprefix(_FILE)).expanduser())
    if not url.isprintable() or "://" not in url:
        raise ConfigError(f"{entry}: contains no URL", hint="https://appriseit.com lists the form for each service")
    return url


def _read(entry: str, path: Path) -> str:
    try:
        with open(path, "rb", opener=open_regular) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigError(
                    f"{entry}: others can read it (mode {stat.S_IMODE(status.st_mode):o}, user {status.st_uid})",
                    hint=f"make it your own and private: `chmod 600 {path}`",
                )
            return file.read(_MAX_BYTES).decode().strip()
    except (OSError, ValueError) as error:
        reason = why(error) if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigError(f"{entry}: can't be read ({reason})", hint="write the URL into it, mode 600") from None
