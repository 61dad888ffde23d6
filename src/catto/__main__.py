"""Entry point of the command `catto` and of `python -m catto`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback, even while its modules are being imported."""
    try:
        from catto.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
