"""Files on shared storage that every process of a job reads at its start. Standard library only.

The first process on a node copies such a file into the job's private folder there; the others read the copy. So 2,048
processes on 64 nodes open the shared file 64 times.
"""

from __future__ import annotations

import os
from pathlib import Path

from hlatctl.run import reading
from hlatctl.run.atomic import new_file
from hlatctl.run.errors import StorageError
from hlatctl.run.locks import locked_file
from hlatctl.run.scratch import JOB_FOLDER_ENV


def read_text(path: Path) -> str:
    """Return a file's content as UTF-8 text, from this node's copy if the process belongs to a job.

    If the copy can't be made, the file itself is read. It must not change while the job runs, and no other file of that
    name may be read in this way.

    Raises:
        OSError: the file is missing, is no regular file, or can't be read.
        ValueError: it is not UTF-8.
    """
    folder = os.environ.get(JOB_FOLDER_ENV)
    if folder is None:
        return reading.read_text(path)
    copy = Path(folder) / path.name
    try:
        with locked_file(copy.with_name(f".{path.name}.lock")):
            if not copy.exists():
                content = reading.read_bytes(path)
                with new_file(copy) as temporary:
                    temporary.write_bytes(content)
        return reading.read_text(copy)
    except (OSError, StorageError):
        return reading.read_text(path)
