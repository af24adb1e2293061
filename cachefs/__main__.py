"""`python -m cachefs` is the `cachefs` command."""

import sys

from cachefs.cli import main

if __name__ == "__main__":
    sys.exit(main())
