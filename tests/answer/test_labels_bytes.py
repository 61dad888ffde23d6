"""Labels whose first character takes several tokens, labels that collide as written, responses that cannot be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model
from tokenizer_kinds import byte_level, firsts, kinds, metaspace

from catto.answer.confidence import close_token_ids
from catto.answer.tokens import UnreadableLabelError, check_labels, encode_opening, find_label_token, locate_label
from catto.answer_columns import GradedAnswers, read_graded
from catto.engines import Generation
from catto.engines.transformers import TransformersEngine
from catto.io.record_files import read_manifest
from catto.predict import evaluate
from catto.prompts import prompt_ids, render_completion, render_messages
from catto.records import Option, Prediction, Question
from catto.token_ids import decode_ids

THUMBS = ("👍", "👎", "🤷")  # bytes f0 9f 91 8d, f0 9f 91 8e, f0 9f a4 b7
CHOICES = tuple("甲乙丙丁")  # e7 94 b2, e4 b9 99, e4 b8 99, e4 b8 81
YES_NO = ("是", "否")  # e6 98 af, e5 90 a6
BYTES = ("byte-level", "byte-level, tags added", "metaspace")


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def question(labels: tuple[str, ...], name: str = "q") -> Question:
    options = tuple(Option(label=label, text=label) for label in labels)
    fields = {"question": "the cat?"}
    return Question(id=name, task="own", split="test", fields=fields, options=options, gold=labels[0])


@cache
def network() -> Any:
    return tiny_model(0, vocab_size=600, max_position_embeddings=1024)


class Scripted(TransformersEngine):
    """Gives the responses that it was given, one a question, and scores them with a real model."""

    def __init__(self, tokenizer: Any, responses: Sequence[list[int]], finish_reason: str = "stop") -> None:
        super().__init__(network(), tokenizer, batch_size=4)
        self.responses, self.finish_reason = list(responses), finish_reason

    def generate(self, requests: Any, done: Any = ()) -> Any:
        for request in requests:
            ids = self.responses[int(request.question)]
            yield Generation(
                question=request.question,
                sample=0,
                text=decode_ids(self.tokenizer, ids),
                token_ids=tuple(ids),
                prompt_tokens=len(prompt_ids(self.tokenizer, request.messages)),
                finish_reason=self.finish_reason,
                model="scripted",
            )


def predictions(
    tokenizer: Any, labels: tuple[str, ...], responses: Sequence[str | list[int]], finish_reason: str = "stop"
) -> list[Prediction]:
    ids = [encode(tokenizer, text) if isinstance(text, str) else text for text in responses]
    asked = [question(labels, str(place)) for place in range(len(ids))]
    return evaluate(Scripted(tokenizer, ids, finish_reason), asked)


def dense_logprob(tokenizer: Any, labels: tuple[str, ...], before: Sequence[int], path: Sequence[int]) -> float:
    """Log-probability of the path after prompt and response so far, by one plain forward a token, in float64."""
    ids = [*prompt_ids(tokenizer, render_messages(question(labels))), *before]
    total = 0.0
    for token in path:
        with torch.inference_mode():
            logits = network()(input_ids=torch.tensor([ids])).logits[0, -1].double()
        total += float(logits.log_softmax(-1)[token])
        ids.append(token)
    return total


# How many of a label's bytes all labels share, and how many more tell each label from the rest.
SHARED = {THUMBS: 2, CHOICES: 0, YES_NO: 0}
MORE = {THUMBS: (2, 2, 1), CHOICES: (1, 2, 3, 3), YES_NO: (1, 1)}


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("labels", [THUMBS, CHOICES, YES_NO], ids="".join)
@pytest.mark.parametrize("response", ["<think>\nthe cat\n</think>\n<answer>\n{}\n</answer>", "<think>\nthe cat", "{}"])
def test_labels_of_several_bytes_are_read_where_they_differ(name: str, labels: tuple[str, ...], response: str) -> None:
    tokenizer = kinds()[name]
    check_labels(tokenizer, labels)
    found = predictions(tokenizer, labels, [response.format(label) for label in labels])
    head = "<think>\nthe cat\n</think>\n<answer>\n" if response != "{}" else ""
    for label, one in zip(labels, found, strict=True):
        assert one.source == {"{}": "plain", "<think>\nthe cat": "fallback"}.get(response, "free")
        assert one.label == label or one.source == "fallback"
        for other, more in zip(labels, MORE[labels], strict=True):
            ids = encode(tokenizer, head + other)
            start = len(ids) - len(other.encode())
            if name == "metaspace" and head:
                assert tokenizer.convert_ids_to_tokens(ids[start]).startswith("<0x")
            split = start + SHARED[labels]
            expected = dense_logprob(tokenizer, labels, ids[:split], ids[split : split + more])
            assert one.label_logprobs is not None
            assert one.label_logprobs[other] == pytest.approx(expected, abs=1e-5)
        assert sum(map(math.exp, one.label_logprobs.values())) <= 1
        assert one.confidence == pytest.approx(math.exp(one.label_logprobs[str(one.label)]), rel=1e-9)
        assert (one.logsumexp is None) == (max(MORE[labels]) > 1)


def test_training_reads_one_token_and_says_so() -> None:
    tokenizer = kinds()["byte-level"]
    index, candidates = find_label_token(
        tokenizer, ids := encode(tokenizer, render_completion("the cat", "是")), YES_NO
    )
    assert ids[index] == candidates[0] != candidates[1]
    assert decode_ids(tokenizer, ids[:index]).endswith("<answer>\n")
    pair = THUMBS[:2]  # three bytes in common, then one that differs
    index, candidates = find_label_token(tokenizer, ids := encode(tokenizer, render_completion("the cat", "👎")), pair)
    assert ids[index] == candidates[1] != candidates[0]
    assert decode_ids(tokenizer, ids[: index + 1]).endswith("<answer>\n👎")
    assert decode_ids(tokenizer, ids[:index]).rstrip("\ufffd").endswith("<answer>\n")
    with pytest.raises(ValueError, match=r"labels '👍' and '👎' begin with the same token .* training reads one token"):
        find_label_token(tokenizer, encode(tokenizer, render_completion("the cat", "👎")), THUMBS)
    two_pairs = ("👍", "😀", "👎", "😁")  # 😀 and 😁 are f0 9f 98 80 and f0 9f 98 81
    with pytest.raises(ValueError, match="labels '👍' and '👎' begin with the same token"):
        find_label_token(tokenizer, encode(tokenizer, render_completion("the cat", "👎")), two_pairs)


def test_labels_that_begin_with_the_same_character_are_refused() -> None:
    with pytest.raises(ValueError, match="labels '是的' and '是否' begin with the same token"):
        check_labels(kinds()["byte-level"], ("是的", "是否"))
    with pytest.raises(ValueError, match="labels '是的' and '是否' begin with the same token"):
        encode_opening(kinds()["byte-level"], "<answer>\n", ("是的", "是否"))


@cache
def toxic() -> Any:
    """ "To" is one token, "to" is not: toxic and tolerable are t, o, x and tol; capitalised both begin with To."""
    return byte_level(["Tom To Total"] * 40 + ["tolerable tolerable toxic toxic"] * 40, size=520)


def test_labels_that_collide_in_another_case_are_no_answer() -> None:
    labels, tokenizer = ("toxic", "tolerable"), toxic()
    check_labels(tokenizer, labels)
    written = [encode(tokenizer, render_completion("the cat", label)) for label in ("toxic", "Toxic", "Tolerable")]
    starts = [len(encode(tokenizer, render_completion("the cat", None)))] * 3
    assert written[1][starts[1]] == written[2][starts[2]]
    lower, *capitalised = predictions(tokenizer, labels, written)
    assert (lower.label, lower.source) == ("toxic", "free")
    assert [one.source for one in capitalised] == ["fallback", "fallback"]
    assert {one.label for one in capitalised} <= set(labels)


def test_an_odd_response_never_ends_a_run() -> None:
    """Lone bytes, specials, torn tags, repeated tags: every response of every kind gets an answer."""
    draws = torch.Generator().manual_seed(0)
    for name, tokenizer in kinds().items():
        size = min(len(tokenizer), 600)
        odd = [torch.randint(0, size, (12,), generator=draws).tolist() for _ in range(12)]
        answer = encode(tokenizer, "<answer>\nB")
        odd += [[*answer[:-1], *one[:4], answer[-1], *one[4:]] for one in odd[:4]] + [[*one, *answer] for one in odd]
        odd += [encode(tokenizer, text) for text in ("<answer>\nb", "<answer>(b", "B", "<think>B</think>", "")]
        found = predictions(tokenizer, ("A", "B"), odd)
        assert len(found) == len(odd), name
        assert {one.label for one in found} <= {"A", "B"}
        assert {one.source for one in found} >= {"free", "fallback"}


class Shrinking:
    """A tokenizer whose texts do not begin with their prefixes' texts: an odd token swallows what came before it."""

    def __init__(self) -> None:
        self.inner = kinds()["byte-level"]
        self.odd = self.inner.convert_tokens_to_ids("z")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.inner(*arguments, **options)

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        text = str(self.inner.decode(list(ids), **options))
        return text.replace("<answer>\nB", "<answer>\nA") if ids and ids[-1] == self.odd else text


def test_tokens_whose_text_does_not_begin_with_their_prefixes_text_are_no_answer() -> None:
    tokenizer = Shrinking()
    ids = [*encode(tokenizer, "<answer>\nB\n</answer>"), tokenizer.odd]
    assert decode_ids(tokenizer, ids).startswith("<answer>\nA\n</answer>")
    with pytest.raises(UnreadableLabelError, match="does not begin with their prefixes' texts"):
        locate_label(tokenizer, ids, ("A", "B"))
    (one,) = predictions(tokenizer, ("A", "B"), [ids])
    assert one.source == "fallback"
    assert one.label in ("A", "B")


def test_a_closed_response_leaves_room_for_all_tokens_that_tell_a_label() -> None:
    tokenizer = kinds()["byte-level"]
    ids = encode(tokenizer, "<think>\n" + "the cat " * 20)
    for room in range(20, 40):
        closed = close_token_ids(tokenizer, ids, CHOICES, room)
        assert closed is not None
        assert max(map(len, closed.paths.values())) == max(MORE[CHOICES])
        assert closed.needed_length == room


def test_a_prompt_that_leaves_no_room_for_an_answer_is_counted_not_raised() -> None:
    tokenizer = kinds()["byte-level"]
    ids = encode(tokenizer, "the")
    needed = len(prompt_ids(tokenizer, render_messages(question(("A", "B"), "0"))))
    small = tiny_model(0, vocab_size=600, max_position_embeddings=needed + 1)
    engine = Scripted(tokenizer, [ids])
    engine.network, engine.positions = small, needed + 1
    (one,) = evaluate(engine, [question(("A", "B"), "0")])
    assert (one.label, one.source, one.confidence, one.label_logprobs) == (None, "fallback", 0.0, None)


@pytest.mark.parametrize("name", kinds())
def test_an_answer_without_tags_is_found_in_the_tokens(name: str) -> None:
    tokenizer = kinds()[name]
    for text in ("the answer is B", "the cat sat\nAnswer: B", "B"):
        text = (
            text
            if name not in ("unigram", "word-level")
            else text.replace("Answer:", "the answer is").replace("the cat sat\n", "")
        )
        ids = encode(tokenizer, text)
        place = locate_label(tokenizer, ids, tuple("ABCD"))
        assert place is not None
        assert (place.label, place.source) == ("B", "plain")
        assert ids[len(place.ids_before)] == firsts(place)["B"]
        assert tuple(firsts(place)) == tuple("ABCD")
        for label, token in firsts(place).items():
            other = decode_ids(tokenizer, [*ids[: len(place.ids_before)], token, *ids[len(place.ids_before) + 1 :]])
            assert other == decode_ids(tokenizer, ids).removesuffix("B") + label


def test_a_cut_response_is_not_read_in_its_last_line() -> None:
    tokenizer = metaspace()
    texts = ["the cat\nThe answer is B", "<answer>\nB", "<answer>\nB\n", "<answer>\nB\n</ans"]
    cut = predictions(tokenizer, ("A", "B"), texts, finish_reason="length")
    assert [one.source for one in cut] == ["fallback", "fallback", "free", "free"]
    ended = predictions(tokenizer, ("A", "B"), texts)
    assert [one.source for one in ended] == ["plain", "free", "free", "free"]


def test_plain_answers_are_counted_in_the_manifest_and_are_no_fallback(tmp_path: Path) -> None:
    tokenizer = kinds()["byte-level"]
    ids = [encode(tokenizer, text) for text in ("The answer is A.", "<answer>A</answer>", "so it is", "Answer: B")]
    out = tmp_path / "p.jsonl"
    evaluate(Scripted(tokenizer, ids), [question(("A", "B"), str(place)) for place in range(4)], out=out)
    counts = read_manifest(out).counts
    assert (counts["plain"], counts["fallback"], counts["predictions"]) == (2, 1, 4)
    table = read_graded(out, unparsed="wrong")
    assert isinstance(table, GradedAnswers)
    assert table.read_as is not None
    assert [kind == "fallback" for kind in table.read_as] == [False, False, True, False]
    assert table.correct.tolist() == [True, True, False, False]
