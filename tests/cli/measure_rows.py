"""200 answers with too much confidence, as rows of anybody's file."""

from __future__ import annotations

from typing import Any

import numpy as np

RNG = np.random.default_rng(0)
CONFIDENCE = RNG.beta(5, 1, 200)
CORRECT = RNG.random(200) < CONFIDENCE**2


def plain(confidence: Any = CONFIDENCE, correct: Any = CORRECT) -> list[dict[str, Any]]:
    pairs = zip(confidence, correct, strict=True)
    return [{"id": f"q{i}", "confidence": float(c), "correct": bool(z)} for i, (c, z) in enumerate(pairs)]
