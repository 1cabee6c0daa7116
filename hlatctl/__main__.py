"""``python -m hlatctl``: the same as the ``hlatctl`` command."""

import sys

from hlatctl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
