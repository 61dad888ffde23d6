"""How answers were read: inside their tags, in plain words, or forced out of the label set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["KINDS", "MOST_FORCED", "Sources"]

# The values of `Prediction.source`.
KINDS = ("free", "plain", "fallback")
# Above this share of forced answers the numbers describe the fallback.
MOST_FORCED = 0.2


@dataclass(frozen=True)
class Sources:
    """How many answers were read where: free in their tags, plain without tags, fallback forced over the labels.

    >>> counts = Sources.of(["free"] * 3 + ["fallback"] * 17)
    >>> counts.warning
    '17 of 20 answers had to be forced: the numbers below describe the fallback, not the model.'
    """

    free: int = 0
    plain: int = 0
    fallback: int = 0

    @classmethod
    def of(cls, values: Iterable[str]) -> Sources:
        """Count the values of `source`."""
        found = Counter(values)
        return cls(found["free"], found["plain"], found["fallback"])

    @classmethod
    def total_of(cls, parts: Iterable[Sources]) -> Sources:
        """Add several counts up."""
        rows = list(parts)
        return cls(sum(one.free for one in rows), sum(one.plain for one in rows), sum(one.fallback for one in rows))

    @property
    def total(self) -> int:
        """All answers."""
        return self.free + self.plain + self.fallback

    def share(self, kind: str) -> float:
        """The share of one kind, 0 where there are no answers."""
        return float(getattr(self, kind)) / self.total if self.total else 0.0

    @property
    def forced(self) -> bool:
        """Whether more than a fifth of the answers had to be forced, so that no verdict on the model is given."""
        return self.share("fallback") > MOST_FORCED

    @property
    def warning(self) -> str | None:
        """What has to be said before any number where too many answers were forced."""
        return f"{self.counted}: the numbers below describe the fallback, not the model." if self.forced else None

    @property
    def counted(self) -> str:
        """`17 of 20 answers had to be forced`."""
        return f"{self.fallback:,} of {self.total:,} answers had to be forced"

    def told(self, note: str = "") -> str:
        """The shares that need to be known: `fallback 2.0 % (note)`, and `plain 4.0 %` where there are any."""
        plain = f", plain {100 * self.share('plain'):.1f} %" if self.plain else ""
        return f"fallback {100 * self.share('fallback'):.1f} %{f' ({note})' if note else ''}{plain}"
