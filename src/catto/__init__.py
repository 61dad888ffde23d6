"""Align language models on preferences and keep their confidence honest.

Public names load on first use: `import catto` imports no torch.
"""

from __future__ import annotations

__version__ = "0.1.0"
