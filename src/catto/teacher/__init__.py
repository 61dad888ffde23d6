"""From questions to responses, and from responses to SFT, preference and outcome rows.

A run that is killed at any moment can be resumed.
"""

from __future__ import annotations

from catto.teacher.pairing import Yield
from catto.teacher.responses import ask, dry_run, write_rows

__all__ = ["Yield", "ask", "dry_run", "write_rows"]
