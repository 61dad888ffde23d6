"""The server engine against a real HTTP server around the tiny model: the same answers, numbers and fallbacks."""

from __future__ import annotations

import json
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import torch
from evaluation_world import LETTERS, NLI, encode, engine, model, questions, tokenizer
from openai_server import OpenAIServer, Reply, Seen, chat, error, ok

from catto.answer.confidence import Answer, Case, read_label_logprobs, read_reply
from catto.engines import Generation, Request, find_stop_end
from catto.engines.decoding import evaluation_mode, last_logits
from catto.engines.replies import Choice, Token, cut_after_stop
from catto.engines.server import MAX_TOP_LOGPROBS, ServerEngine, ServerError
from catto.predict import evaluate
from catto.prompts import prompt_ids
from catto.records import Message, Option, Prediction, Question

LOCK = threading.Lock()
# A reply's numbers are printed with six digits, as a frugal server would.
DIGITS = 6
# Half a digit of rounding, and fp32 noise: the server runs a prompt whole, the engine what prompts share first.
CLOSE = 4e-6
CUT = 5  # tokens: a response that ends in its reasoning


def served(seen: Seen, *, logprobs: bool = True, continues: bool = True, most: int = 20) -> Reply:
    """Answer with the tiny model, greedily: one forward a token, token texts and the best candidates beside."""
    body = seen.body
    if body.get("logprobs") and not logprobs:
        return error(400, "logprobs are not supported")
    messages = [Message(**message) for message in body["messages"]]
    goes_on = bool(body.get("continue_final_message")) and continues
    begun = encode(messages.pop().content) if goes_on else []
    prompt = [*prompt_ids(tokenizer(), messages), *begun]
    with LOCK:
        ids, rows = greedy(prompt, body["max_tokens"])
    tokens = tokenizer().convert_ids_to_tokens(ids)
    payload = chat("".join(tokens), model="tiny-answerer")
    payload["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
    if body.get("logprobs"):
        entries = [entry(token, row, most) for token, row in zip(ids, rows, strict=True)]
        payload["choices"][0]["logprobs"] = {"content": entries}
    return ok(payload)


def greedy(prompt: list[int], most: int) -> tuple[list[int], list[torch.Tensor]]:
    ids: list[int] = []
    rows: list[torch.Tensor] = []
    while len(ids) < most:
        with evaluation_mode(model()) as hook:
            logits = last_logits(model(), hook, [[*prompt, *ids]])[0].double()
        token = int(logits.argmax())
        if token == tokenizer().eos_token_id:
            break
        ids.append(token)
        rows.append(logits.log_softmax(-1))
        if tokenizer().convert_ids_to_tokens(token) == "</answer>":
            break
    return ids, rows


def entry(token: int, row: torch.Tensor, most: int) -> dict[str, Any]:
    best = row.topk(most)
    tops = [text(int(t), float(v)) for v, t in zip(best.values, best.indices, strict=True)]
    return {**text(token, float(row[token])), "top_logprobs": tops}


def text(token: int, value: float) -> dict[str, Any]:
    return {"token": tokenizer().convert_ids_to_tokens(token), "logprob": round(value, DIGITS)}


@contextmanager
def serving(respond: Callable[[Seen], Reply] = served) -> Iterator[ServerEngine]:
    with OpenAIServer(respond) as server:
        yield ServerEngine(server.url, "tiny-answerer", top_logprobs=20, concurrency=4, max_retries=1)


def both(labels: tuple[str, ...], max_tokens: int) -> tuple[list[Prediction], list[Prediction]]:
    with serving() as remote:
        there = evaluate(remote, questions(8, labels), max_tokens=max_tokens)
    return there, evaluate(engine(), questions(8, labels), max_tokens=max_tokens)


@pytest.mark.parametrize("labels", [LETTERS, NLI])
@pytest.mark.parametrize(("max_tokens", "source"), [(24, "free"), (CUT, "fallback")])
def test_server_and_transformers_give_the_same_predictions(
    labels: tuple[str, ...], max_tokens: int, source: str
) -> None:
    there, here = both(labels, max_tokens)
    assert {one.source for one in here} == {source}
    known = 0
    for one, other in zip(there, here, strict=True):
        assert (one.question, one.text, one.source, one.label) == (
            other.question,
            other.text,
            other.source,
            other.label,
        )
        assert one.confidence == pytest.approx(other.confidence, abs=CLOSE)
        assert one.mean_logprob == pytest.approx(other.mean_logprob, abs=CLOSE)
        assert one.logsumexp is None
        if one.label_logprobs is not None:
            known += 1
            assert one.label_logprobs == pytest.approx(other.label_logprobs, abs=CLOSE)
    assert known >= 4


def test_a_label_outside_the_best_candidates_leaves_the_logprobs_null() -> None:
    with serving(lambda seen: served(seen, most=1)) as remote, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        there = evaluate(remote, questions(12), max_tokens=24)
    assert "the server returns 1 candidate per token" in str(caught[0].message)
    here = evaluate(engine(), questions(12), max_tokens=24)
    free = [(one, other) for one, other in zip(there, here, strict=True) if one.source == "free"]
    assert free
    for one, other in free:
        assert one.label_logprobs is None
        assert (one.label, one.confidence) == (other.label, pytest.approx(other.confidence, abs=CLOSE))


def test_labels_outside_the_best_candidates_are_asked_for_where_the_server_gives_more() -> None:
    """A server that gives the drawn token alone, but of single tokens as many candidates as are asked for."""
    again: list[str] = []

    def respond(seen: Seen) -> Reply:
        more = seen.body.get("top_logprobs", 0) > MAX_TOP_LOGPROBS
        if more and seen.body.get("continue_final_message"):
            again.append(seen.body["messages"][-1]["content"])
        return served(seen, most=len(tokenizer()) if more else 1)

    with serving(respond) as remote:
        there = evaluate(remote, questions(6), max_tokens=24)
    here = evaluate(engine(), questions(6), max_tokens=24)
    assert {one.source for one in here} == {"free"}
    # the label's token begins with the blank before it
    assert sorted(again) == sorted(one.text.partition(f"{one.label}\n</answer>")[0].rstrip(" ") for one in here)
    for one, other in zip(there, here, strict=True):
        assert one.label_logprobs == pytest.approx(other.label_logprobs, abs=CLOSE)
        assert one.confidence == pytest.approx(other.confidence, abs=CLOSE)


def test_candidates_of_a_text_that_was_read_otherwise_are_not_used() -> None:
    question = questions(1)[0]
    reply = Generation(question="q", sample=0, text="A", tops=(("A", {"A": -0.5}),), model="m")
    case = Case(question, (), reply)
    more = {**dict.fromkeys(question.labels, -2.0), "A": -0.6}
    known = read_reply(case, reply.model_copy(update={"tops": (("A", more),)}))
    assert isinstance(known, Answer)
    assert known.label_logprobs == {**more, "A": -0.5}
    elsewhere = {**more, "A": -1.0}  # the drawn token is not as probable: another context
    assert read_reply(case, reply.model_copy(update={"tops": (("A", elsewhere),)})) == read_reply(case)
    others = {label: -2.0 for label in question.labels if label != "A"}
    assert read_reply(case, reply.model_copy(update={"tops": (("B", others),)})) == read_reply(case)


def test_without_continuation_there_is_no_fallback_answer() -> None:
    told = pytest.warns(UserWarning, match="cannot continue a partial message")
    with serving(lambda seen: served(seen, continues=False)) as remote, told:
        there = evaluate(remote, questions(4), max_tokens=CUT)
    assert {(one.source, one.label, one.confidence) for one in there} == {("fallback", None, 0.0)}
    assert {one.label_logprobs for one in there} == {None}


def scripted(text: str) -> Callable[[Seen], Reply]:
    """A server that says `text`, every token at -0.25. It continues as ever."""

    def respond(seen: Seen) -> Reply:
        if seen.body["max_tokens"] == 1:
            return served(seen)
        tokens = tokenizer().convert_ids_to_tokens(encode(text))
        rival = {"token": " A", "logprob": -2.0}
        entries = [{"token": token, "logprob": -0.25, "top_logprobs": [rival]} for token in tokens]
        payload = chat(text, model="tiny-answerer")
        payload["choices"][0]["logprobs"] = {"content": entries}
        return ok(payload)

    return respond


def test_a_servers_answer_without_tags_is_read_at_its_own_token() -> None:
    with serving(scripted("the answer is B")) as remote:
        found = evaluate(remote, questions(2))
    assert {(one.label, one.source) for one in found} == {("B", "plain")}
    assert [one.confidence for one in found] == pytest.approx([math.exp(-0.25)] * 2)


def test_a_server_without_logprobs_is_told_at_the_start() -> None:
    asked: list[Seen] = []

    def respond(seen: Seen) -> Reply:
        asked.append(seen)
        return served(seen, logprobs=False)

    with serving(respond) as remote, pytest.raises(ServerError, match="no log-probabilities"):
        evaluate(remote, questions(12), max_tokens=24)
    assert len(asked) <= 5


def test_the_probe_tells_what_a_server_can_do() -> None:
    missing: list[str] = []
    with serving() as remote:
        remote.probe(missing.append)
        assert (remote.can_continue, remote.max_candidates, missing) == (True, 20, [])
    with serving(lambda seen: served(seen, continues=False)) as remote:
        remote.probe(missing.append)
        assert not remote.can_continue
        assert "cannot continue a partial message" in missing.pop()
    with (
        serving(lambda seen: served(seen, logprobs=False)) as remote,
        pytest.raises(ServerError, match="no log-probabilities"),
    ):
        remote.probe(missing.append)

    def refuses(seen: Seen) -> Reply:
        return error(400, "unknown field") if "continue_final_message" in seen.body else served(seen)

    with serving(refuses) as remote:
        remote.probe(missing.append)
    assert not remote.can_continue
    assert len(missing) == 1


def test_the_probe_asks_for_single_tokens() -> None:
    bodies: list[dict[str, Any]] = []

    def respond(seen: Seen) -> Reply:
        bodies.append(seen.body)
        return served(seen)

    with serving(respond) as remote:
        remote.probe()
    assert {body["max_tokens"] for body in bodies} == {1}
    assert json.dumps(bodies).count("continue_final_message") == 3


def test_an_engine_that_asks_for_no_candidates_is_refused() -> None:
    with serving() as remote:
        remote.top_logprobs = 0
        with pytest.raises(ValueError, match="top_logprobs 0"):
            evaluate(remote, questions(2))


def test_labels_among_candidate_texts() -> None:
    tops = {"A": -1.0, " A": -2.0, "B": -1.5, "ent": -0.5, "e": -3.0, "neutral": -2.5, "\n": -0.1}

    def logprobs(labels: Sequence[str], **place: str) -> dict[str, float]:
        return read_label_logprobs({label: label for label in labels}, tops, **place)

    assert logprobs(("A", "B", "C")) == {"A": -1.0, "B": -1.5}
    assert logprobs(("A", "B"), lead=" ") == {"A": -2.0}
    assert logprobs(NLI) == {"entailment": -0.5, "neutral": -2.5}
    # Two labels that one token begins cannot be told apart.
    assert logprobs(("entailment", "entitled")) == {}


def _served(labels: tuple[str, ...], *tokens: tuple[str, dict[str, float]]) -> Any:
    """What is read from a server's reply that answers with these tokens."""
    options = tuple(Option(label=label, text="") for label in labels)
    question = Question(id="q", task="t", split="test", fields={"question": "?"}, options=options, gold=labels[0])
    tops = (("<answer>", {"<answer>": -0.1}), *tokens, ("</answer>", {"</answer>": -0.1}))
    text = "".join(token for token, _ in tops)
    known = {"question": "q", "sample": 0, "model": "m", "finish_reason": "stop", "tokens": len(tops)}
    return read_reply(Case(question, (), Generation(text=text, tops=tops, **known)))


def test_rivals_are_read_in_the_case_in_which_the_label_was_written() -> None:
    shown = {"Ent": -0.1, "Neutral": -2.5, "Contr": -4.0, "neutral": -7.0, "contr": -9.0}
    answer = _served(NLI, ("Ent", shown), ("ailment", {"ailment": -0.1}))
    assert answer.label == "entailment"
    assert answer.label_logprobs == {"entailment": -0.1, "neutral": -2.5, "contradiction": -4.0}
    answer = _served(("A", "B"), ("b", {"b": -0.2, "a": -1.8, "A": -6.0}))
    assert (answer.label, answer.label_logprobs) == ("B", {"A": -1.8, "B": -0.2})


def test_a_label_that_begins_another_is_read_where_that_one_is_a_token() -> None:
    labels = tuple(map(str, range(1, 11)))
    shown = {"1": -0.1, "10": -2.6, "7": -4.0}
    answer = _served(labels, ("1", shown))
    assert (answer.label, answer.confidence) == ("1", pytest.approx(math.exp(-0.1)))
    assert "'1' and '10' begin with the same token" in _served(labels, ("1", {"1": -0.1})).refused
    assert _served(("1", "10"), ("1.", {"1.": -0.1})).label == "1"  # the token ends behind the label


def test_a_label_in_two_tokens_does_not_get_the_probability_of_another_that_is_the_first() -> None:
    """Of digits written one by one, `1` has the probability of 1 and of 10 together."""
    labels = tuple(map(str, range(1, 11)))
    for shown in ({"1": -0.1, "9": -3.0}, {"1": -0.1, "10": -5.0}):
        assert "'10' and '1' begin with the same token '1'" in _served(labels, ("1", shown), ("0", {"0": -2.3})).refused


@pytest.mark.parametrize(("third", "token"), [("not sure", "not"), ("none", "none"), ("none", "non")])
def test_labels_that_begin_alike_are_told_apart_where_a_longer_candidate_begins_one(third: str, token: str) -> None:
    labels, shown = ("yes", "no", third), {"no": -0.4, "yes": -1.6, token: -2.5}
    answer = _served(labels, ("no", shown))
    assert (answer.label, answer.label_logprobs) == ("no", {"yes": -1.6, "no": -0.4, third: -2.5})
    capital = {name.capitalize(): value for name, value in shown.items()}
    assert _served(labels, ("No", capital)).label_logprobs == answer.label_logprobs
    rest = third.removeprefix(token)
    assert _served(labels, (token, shown), *([(rest, {rest: -0.1})] if rest else [])).confidence == math.exp(-2.5)
    assert "begin with the same token" in _served(labels, ("no", {"no": -0.4, "nod": -2.0})).refused


@pytest.mark.parametrize(
    ("labels", "shown", "label"),
    [
        (tuple(map(str, range(1, 11))), {"1": -0.2, "2": -3.0}, None),
        (("yes", "yellow", "no"), {"ye": -0.1, "no": -3.9}, None),
        (("yes", "yellow", "no"), {"ye": -3.9, "no": -0.1}, "no"),
        (("yes", "no", "not sure"), {"no": -0.1, "not": -2.6, "yes": -4.0}, "no"),
        (("yes", "no", "not sure"), {"no": -0.1, "yes": -4.0}, None),
    ],
)
def test_no_label_is_forced_where_a_likelier_token_begins_two_others(
    labels: tuple[str, ...], shown: dict[str, float], label: str | None
) -> None:
    options = tuple(Option(label=name, text="") for name in labels)
    question = Question(id="q", task="t", split="test", fields={"question": "?"}, options=options, gold=labels[0])
    known = {"question": "q", "sample": 0, "model": "m", "finish_reason": "stop", "tokens": 1}
    open_end = Generation(text="Well.", tops=(("Well.", {"Well.": -0.1}),), **known)
    first = next(iter(shown))
    answer = read_reply(Case(question, (), open_end), Generation(text=first, tops=((first, shown),), **known))
    assert isinstance(answer, Answer)
    assert answer.label == label


def test_a_whole_answer_that_the_reasoning_quotes_does_not_end_the_response() -> None:
    stop = ("</answer>",)
    quoting = "<think>\nA form is <answer>A</answer>.\n</think>\n<answer>\nB\n</answer>"
    for text in (quoting, quoting.removeprefix("<think>")):  # the second as after a template that opens the reasoning
        assert find_stop_end(f"{text} More. <answer>C</answer>", stop) == len(text)
    growing = [find_stop_end(quoting[:end], stop) for end in range(len(quoting) + 1)]
    assert growing == [None] * len(quoting) + [len(quoting)]  # as a local engine decodes it
    assert find_stop_end("<answer>A</answer> <think>So</think> <answer>B</answer>", stop) == 18


def test_characters_of_several_tokens_are_read_from_their_bytes() -> None:
    dog = "🐶".encode()
    tokens = [{"token": "\\xf0\\x9f", "logprob": -1.0, "bytes": list(dog[:2])}]
    tokens += [{"token": "\\x90\\xb6", "logprob": -1.0, "bytes": list(dog[2:])}, {"token": " A", "logprob": -0.5}]
    choice = Choice.model_validate({"message": {"content": "🐶 A"}, "logprobs": {"content": tokens}})
    text, tops, _ = cut_after_stop(choice, ())
    assert (text, tops) == ("🐶 A", (("", {"": -1.0}), ("🐶", {"🐶": -1.0}), (" A", {" A": -0.5})))


def test_log_probabilities_of_a_reasoning_alone_are_log_probabilities() -> None:
    """As in the reply of one token that asks whether a server has any."""
    message = {"content": None, "reasoning_content": "Okay"}
    tokens = [{"token": "Okay", "logprob": -0.1}]
    choice = Choice.model_validate({"message": message, "logprobs": {"content": tokens}})
    assert cut_after_stop(choice, ()) == ("", (("Okay", {"Okay": -0.1}),), -0.1)


def test_of_candidates_with_one_text_the_likeliest_counts_and_the_drawn_one_stays() -> None:
    tops = [{"token": text, "logprob": value} for text, value in (("A", -0.1), ("B", -2.6), ("A", -6.0), ("B", -7.0))]
    assert Token.model_validate({"token": "A", "logprob": -0.1, "top_logprobs": tops}).candidates == {
        "A": -0.1,
        "B": -2.6,
    }
    assert Token.model_validate({"token": "A", "logprob": -6.0, "top_logprobs": tops}).candidates["A"] == -6.0


def test_tokens_of_a_reasoning_that_is_reported_apart_are_left_out() -> None:
    tokens = [{"token": text, "logprob": value} for text, value in (("A", -5.0), (" cat", -1.0), ("A", -0.05))]
    message = {"role": "assistant", "content": "A", "reasoning_content": "A cat"}
    choice = Choice.model_validate({"message": message, "logprobs": {"content": tokens}})
    assert cut_after_stop(choice, ()) == ("A", (("A", {"A": -0.05}),), -0.05)


@pytest.mark.parametrize("before", [(), ("Let", " me", "</think>", "\n\n"), ("A", "</think>"), ("\n\n",)])
@pytest.mark.parametrize("end", [(), ("<|im_end|>",), ("<|EOT A|>",), ("\n",)])
@pytest.mark.parametrize("texts", [("A",), ("<answer>", "A", "</answer>")])
def test_tokens_around_the_text_are_left_out(
    before: tuple[str, ...], texts: tuple[str, ...], end: tuple[str, ...]
) -> None:
    """A reasoning, blank lines that were stripped, and the token that ends the turn, which may contain a label."""
    tokens = [{"token": token, "logprob": -1.0} for token in (*before, *texts, *end)]
    choice = Choice.model_validate({"message": {"content": "".join(texts)}, "logprobs": {"content": tokens}})
    _, tops, _ = cut_after_stop(choice, ())
    assert tops is not None
    assert [token for token, _ in tops] == [*texts]


def test_a_server_that_allows_fewer_candidates_is_asked_for_fewer() -> None:
    def respond(seen: Seen) -> Reply:
        few = seen.body.get("top_logprobs", 0) <= 5
        return served(seen) if few else error(400, "top_logprobs must be between 0 and 5")

    with serving(respond) as remote:
        remote.probe(lambda _: None)
        assert (remote.top_logprobs, remote.max_candidates) == (5, 5)
        assert {one.source for one in evaluate(remote, questions(2), max_tokens=24)} <= {"free", "plain", "fallback"}
    refusing = serving(lambda seen: error(400, "logprobs: no") if "logprobs" in seen.body else served(seen))
    with refusing as remote, pytest.raises(ServerError, match="no log-probabilities: 400 in try 1: logprobs: no"):
        remote.probe()


def test_labels_that_share_a_token_as_written_are_refused() -> None:
    lower, upper = (
        _served(("Toxic", "Tolerable"), (begin, {begin: -0.2, "No": -3.0}), ("xic", {"xic": -0.1}))
        for begin in ("to", "To")
    )
    assert "'Toxic' and 'Tolerable' begin with the same token 'to'" in lower.refused
    assert "'Toxic' and 'Tolerable' begin with the same token 'To'" in upper.refused


def test_a_request_is_what_the_official_client_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k-1")
    seen: list[Seen] = []

    def respond(one: Seen) -> Reply:
        seen.append(one)
        return served(one)

    with serving(respond) as remote:
        list(remote.generate([Request(question="q", messages=(Message(role="user", content="thé"),), max_tokens=2)]))
        with openai.OpenAI(base_url=remote.base_url, max_retries=0) as official:
            official.chat.completions.create(**seen[0].body)
    ours, theirs = seen
    assert ours.body == theirs.body
    for name in ("authorization", "content-type", "accept-encoding", "connection", "host"):
        assert ours.headers[name] == theirs.headers[name]
    assert ours.headers["user-agent"].startswith("catto/")
