"""`python -m catto` is the command `catto`."""

from __future__ import annotations

from catto.cli import main

if __name__ == "__main__":
    main()
