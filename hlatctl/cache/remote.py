"""A run's remote folder: the copies of its checkpoints in object storage, their names, and which are complete.

    <checkpoint.remote_url>/<run_id>/config.yaml
    <checkpoint.remote_url>/<run_id>/step-00001000-<manifest>/   a checkpoint's files; manifest.json is written last

A copy without ``manifest.json`` is incomplete. ``<manifest>`` is the beginning of the manifest's SHA-256, so a step
that a run has written twice has two names, and their files never mix. ``trainer.checkpoint.remote`` writes and reads
the copies.
"""

from __future__ import annotations

import argparse
import re
import sys
import uuid
from dataclasses import dataclass

from hlatctl.cache.store import Objects, within
from hlatctl.run.checkpoint import MANIFEST, Manifest
from hlatctl.run.errors import DependencyError, RunExistsError, StorageError, run_main
from hlatctl.run.paths import step_name

#: The run's configuration, to recreate its directory from.
CONFIG = "config.yaml"
_ID_CHARS = 12
#: Time limit for a small object; a slower service is not usable.
_PROBE_S = 60.0
_NAME = re.compile(rf"step-(\d{{8,}})-([0-9a-f]{{{_ID_CHARS}}})")


@dataclass(frozen=True, order=True)
class Copy:
    """A checkpoint in the remote folder; later steps are greater.

    Args:
        identity: the beginning of the manifest's SHA-256.
    """

    step: int
    identity: str

    @classmethod
    def of(cls, manifest: Manifest) -> Copy:
        """Return the copy of a checkpoint."""
        return cls(manifest.step, manifest.sha256[:_ID_CHARS])

    @property
    def name(self) -> str:
        """Name of its folder in the remote folder."""
        return f"{step_name(self.step)}-{self.identity}"

    @property
    def manifest(self) -> str:
        """Path of its manifest in the remote folder."""
        return f"{self.name}/{MANIFEST}"

    def is_of(self, manifest_sha256: str) -> bool:
        """Return whether it is a copy of the checkpoint with this manifest."""
        return manifest_sha256.startswith(self.identity)


def remote_folder(remote_url: str, run_id: str) -> Objects:
    """Return a run's remote folder, which is in ``checkpoint.remote_url``.

    Raises:
        StorageError, DependencyError: the URL is invalid, or a package is missing.
    """
    return Objects(f"{remote_url.rstrip('/')}/{run_id}")


def all_copies(remote: Objects) -> list[Copy]:
    """Return all copies, incomplete ones too, newest step first; costs one listing."""
    named = (_NAME.fullmatch(name) for name in remote.folders())
    return sorted((Copy(int(match[1]), match[2]) for match in named if match), reverse=True)


def complete_copies(remote: Objects) -> list[Copy]:
    """Return the complete copies, newest step first; costs a listing, and a request for each copy."""
    return [copy for copy in all_copies(remote) if remote.size(copy.manifest) is not None]


def delete(remote: Objects, copy: Copy) -> None:
    """Delete a copy, its manifest first, so that a partly deleted one never counts."""
    remote.delete(copy.manifest)
    remote.delete(copy.name)


def check_writable(remote_url: str) -> None:
    """Write, read and delete a small object, to detect an unusable remote folder early.

    Raises:
        StorageError: the remote folder is unusable; has the service's reason.
        DependencyError: a package is missing.
    """
    try:
        remote = Objects(remote_url)
    except (StorageError, DependencyError) as error:
        raise type(error)(f"checkpoint.remote_url={error.message}", hint=error.hint) from None
    content = uuid.uuid4().hex
    probe = f".probe-{content}"

    def returns_what_is_written() -> bool:
        remote.write(content.encode(), probe)
        same = remote.read(probe) == content.encode()
        remote.delete(probe)
        return same

    try:
        same = within(_PROBE_S, returns_what_is_written)
    except Exception as error:  # whatever the service's library raises
        raise unusable(remote_url, f"can't be used ({type(error).__name__}: {error})") from None
    if not same:
        raise unusable(remote_url, "does not return what was written to it")


def unusable(remote_url: str, what: str) -> StorageError:
    """Return the error of a remote folder that can't be written or read."""
    hint = (
        "check that the bucket exists and that the environment has credentials that may read, write, list and delete "
        "(s3://: AWS_PROFILE, AWS_ACCESS_KEY_ID or the machine's role); or set checkpoint.remote_url=null"
    )
    return StorageError(f"checkpoint.remote_url={remote_url}: {what}", hint=hint)


def main(argv: list[str] | None = None) -> int:
    """Check that a remote folder can be written; with ``--new-run``, also that it has no run of that id."""
    parser = argparse.ArgumentParser(prog="hlatctl.cache.remote")
    parser.add_argument("--url", required=True)
    parser.add_argument("--new-run", metavar="RUN_ID")
    arguments = parser.parse_args(argv)
    check_writable(arguments.url)
    if arguments.new_run and all_copies(remote := remote_folder(arguments.url, arguments.new_run)):
        raise RunExistsError(
            f"--run-id={arguments.new_run}: {remote.url} already has checkpoints of a run with this id",
            hint=f"`hlatctl checkpoint restore {remote.url}` continues that run; use another id for a new one",
        )
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
