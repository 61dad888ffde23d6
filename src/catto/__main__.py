"""The command `catto`, also as `python -m catto`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback, also while its modules are imported."""
    try:
        from catto.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
