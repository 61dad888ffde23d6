"""Requests that a server refuses for good: why, told without secrets, and how many of them are too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from catto.engines import Key
from catto.records import Refusal

MOST_REFUSED = 0.2
# A share is judged from so many questions on.
ENOUGH = 20
# A server that throws a prompt back quotes at least so many characters of it.
QUOTED = 20
LONGEST_REASON = 300


class ServerError(RuntimeError):
    """What stops a run, in one line and without the key."""


class RefusalCap:
    """Stop a run of which too much is refused: it is the settings' fault then, and not that of single requests.

    Questions are counted, not requests: the samples of one filtered question are all refused. `most` is the largest
    share of refused questions, judged from 20 on; 1 is no limit. A run whose first 20 requests are all refused is
    stopped as well. What an earlier run has stored counts in the share.
    """

    def __init__(self, most: float, answered: Iterable[Key] = (), refused: Iterable[Key] = ()) -> None:
        self.most = most
        self._refused = {question for question, _ in refused}
        stored = {question for question, _ in answered}
        self._asked, self._some, self._requests = self._refused | stored, bool(stored), 0

    def answered(self, key: Key) -> None:
        """Count an answer."""
        self._asked.add(key[0])
        self._some = True

    def refused(self, refusal: Refusal) -> None:
        """Count a refusal; raise ServerError where it is one too many."""
        self._refused.add(refusal.question)
        self._asked.add(refusal.question)
        self._requests += 1
        if self.most >= 1:
            return
        if not self._some and self._requests >= ENOUGH:
            raise self._stop(f"all of the first {self._requests} requests were refused", refusal)
        if len(self._asked) >= ENOUGH and len(self._refused) > self.most * len(self._asked):
            share = f"{len(self._refused)} of {len(self._asked)} questions were refused, max_refused is {self.most:g}"
            raise self._stop(share, refusal)

    @staticmethod
    def check_some(answered: int, refusals: Iterable[Refusal]) -> None:
        """Raise ServerError where everything was refused, however few requests there were."""
        if not answered and (last := next(iter(refusals), None)) is not None:
            raise RefusalCap._stop("every request was refused", last)

    @staticmethod
    def _stop(what: str, last: Refusal) -> ServerError:
        return ServerError(f"{what}, such as question {last.question} sample {last.sample}: {last.refused}")


def told(refusals: Iterable[Refusal]) -> str:
    """Count the refusals by reason, the commonest first: `2 x 400 in try 1: flagged`."""
    reasons = Counter(refusal.refused for refusal in refusals)
    return "; ".join(f"{count:,} x {reason}" for reason, count in reasons.most_common(3)) + (
        "; ..." if len(reasons) > 3 else ""
    )


def one_line(text: str, secrets: Iterable[str] = (), prompt: Iterable[str] = ()) -> str:
    """Put a server's message on one line, without secrets and without what it quotes of the prompt."""
    line = " ".join(text.replace("\\n", " ").replace('\\"', '"').split())
    for secret in secrets:
        line = line.replace(secret, "[key]") if secret else line
    return _unquoted(line, [" ".join(part.split()) for part in prompt])[:LONGEST_REASON]


def _unquoted(line: str, texts: Iterable[str]) -> str:
    """Replace every stretch of at least QUOTED characters that also stands in a text; linear in both."""
    grams = {text[i : i + QUOTED] for text in texts for i in range(len(text) - QUOTED + 1)}
    kept: list[str] = []
    end = 0  # where the last quotation ends
    for place, character in enumerate(line):
        if line[place : place + QUOTED] in grams:
            if place >= end:
                kept.append("[prompt]")
            end = place + QUOTED
        if place >= end:
            kept.append(character)
    return "".join(kept)
