"""Where notifications go: ``env:NAME`` or ``file:PATH``, which contain an Apprise URL.

Such a URL contains a token, so it is in no configuration, and errors never repeat it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from conf.schema import Config
from hlatctl.run.errors import ConfigError
from hlatctl.run.reading import open_regular, why

_ENV, _FILE = "env:", "file:"
_ENTRY = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:~?/[^\s,]+")
_MAX_BYTES = 4096
_HOW = "notify.urls=[env:NAME] reads the variable NAME, notify.urls=[file:/PATH] a file of mode 600"


def check_override(key: str, value: str) -> None:
    """Refuse an override of ``notify.urls`` that contains anything except entries.

    Raises:
        ConfigError: it names the key only.
    """
    if key == "notify.urls" or key.startswith(("notify.urls.", "notify.urls[")):
        for entry in value.strip("[] ").split(","):
            if word := entry.strip("[]'\" "):
                check_entry(key, word)


def check_entry(key: str, entry: str) -> None:
    """Refuse what is not ``env:NAME`` or ``file:PATH``.

    Raises:
        ConfigError: it names the key only, because the value may be a secret.
    """
    if not _ENTRY.fullmatch(entry):
        raise ConfigError(
            f"{key}: must be env:NAME or file:/PATH; the URL of a service contains a secret, and the value would be "
            "written into config.yaml",
            hint=_HOW,
        )


def entries(config: Config) -> Iterator[ConfigError]:
    """Yield the errors of ``notify.urls``; a rule of ``conf.validate``."""
    for index, entry in enumerate(config.notify.urls):
        key = f"notify.urls[{index}]"
        try:
            check_entry(key, entry)
        except ConfigError as error:
            yield error
        if entry in config.notify.urls[:index]:
            yield ConfigError(f"{key}={entry}: is listed twice", hint="list it once")


def check(config: Config) -> None:
    """Check that every entry can be read here.

    Raises:
        ConfigError: a variable is not set, or a file can't be used.
    """
    for index, entry in enumerate(config.notify.urls):
        try:
            resolve(entry)
        except ConfigError as error:
            raise ConfigError(f"notify.urls[{index}]={error.message}", hint=error.hint) from None


def resolve(entry: str) -> str:
    """Return the Apprise URL that an entry names.

    Raises:
        ConfigError: the variable is not set or empty; the file is missing, is not yours, or others can read it.
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
