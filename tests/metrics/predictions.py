"""Predictions made by hand."""

from __future__ import annotations

from catto.records import Prediction


def prediction(question: str, sample: int, label: str | None, confidence: float, **more: object) -> Prediction:
    fields = {
        "question": question,
        "task": "t",
        "split": "test",
        "gold": "A",
        "sample": sample,
        "text": "",
        "label": label,
        "source": "free",
        "confidence": confidence,
        "mean_logprob": -1.0,
        "temperature": 1.0,
        "seed": 0,
        "engine": "e",
        "model": "m",
    }
    return Prediction.model_validate({**fields, **more})
