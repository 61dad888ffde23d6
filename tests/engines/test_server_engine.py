"""The server engine against a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial

import httpx2 as httpx
import pytest
from openai_server import Body, OpenAIServer, Reply, Seen, chat, counted, error, ok
from server_cases import by_seed, engine, refused, request
from teacher_world import questions

from catto.engines import Generation, model_name
from catto.engines.server import ServerEngine, ServerError
from catto.engines.server import _certificates as certificates
from catto.predict import evaluate


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_every_response_is_one_request_with_its_own_temperature_and_seed() -> None:
    requests = [request(i, temperature=0.6 + i / 10) for i in range(5)]
    with OpenAIServer(by_seed) as server:
        found = {g.sample: g for g in engine(server).generate(requests)}
    assert {i: g.text for i, g in found.items()} == {i: f"text {100 + i}" for i in range(5)}
    sent = {seen.body["seed"]: seen.body for seen in server.seen}
    assert len(server.seen) == 5
    assert sent[103] == {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        "model": "m",
        "max_tokens": 9,
        "seed": 103,
        "temperature": pytest.approx(0.9),
    }
    assert found[0].model == "tiny-teacher"
    assert (found[0].prompt_tokens, found[0].tokens, found[0].finish_reason) == (7, 2, "stop")
    assert found[0].temperature_acts


def sampling_seeds(seed: int) -> list[int]:
    """The seeds that a server gets for 3 samples of each of 5 questions, in order of prompt and seed."""

    def respond(seen: Seen) -> Reply:
        reply = chat("<answer>\nB\n</answer>")
        tokens = [("<answer>\n", 0.0), ("B", -0.5), ("\n</answer>", 0.0)]
        content = [{"token": token, "logprob": logprob, "top_logprobs": []} for token, logprob in tokens]
        reply["choices"][0]["logprobs"] = {"content": content}
        return ok(reply)

    with OpenAIServer(respond) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this server gives no candidates and continues no message
        evaluate(engine(server, top_logprobs=20), questions(5), k=3, temperature=1.0, seed=seed)
    asked = [seen.body for seen in server.seen if seen.body["messages"][0]["content"] != "Count."]
    pairs = sorted((json.dumps(body["messages"]), body["seed"]) for body in asked)
    return [number for _, number in pairs]


def test_every_sample_of_every_question_has_a_seed_of_its_own() -> None:
    """With one seed for the same sample of all questions, their draws would not be independent."""
    seeds = sampling_seeds(0)
    assert len(seeds) == len(set(seeds)) == 15
    assert sampling_seeds(0) == seeds
    assert not {*sampling_seeds(1)} & {*seeds}


def test_a_slash_after_the_address_changes_nothing() -> None:
    with OpenAIServer(by_seed) as server:
        for url in (server.url, f"{server.url}/"):
            assert ServerEngine(url, "m").base_url == server.url
            assert [g.text for g in ServerEngine(url, "m").generate([request(0)])] == ["text 100"]


def test_a_page_that_echoes_the_key_across_any_cut_shows_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-ABCDEFGHIJKLMNOP")
    for blanks in (0, 900, 960, 990, 65_490, 65_500):
        page = f"<html>{' ' * blanks}\x1b[31m Bearer sk-secret-ABCDEFGHIJKLMNOP </html>".encode()
        with OpenAIServer(lambda _, page=page: Reply(400, page)) as server:
            said = refused(server)
        assert "secret" not in said
        assert said.isprintable()


@pytest.mark.parametrize(("limit", "wanted"), [(5, 5), (20, 20), (1000, 20), (1000, 5)])
def test_a_probe_never_makes_later_requests_ask_for_more_than_was_accepted(limit: int, wanted: int) -> None:
    """The drawn token is not among the best, so that one candidate more is counted than was asked for."""

    def respond(seen: Seen) -> Reply:
        asked = seen.body.get("top_logprobs", 0)
        if asked > limit:
            return error(400, f"top_logprobs must be at most {limit}")
        body, tops = chat("x"), [{"token": f"t{n}", "logprob": -1.0 - n} for n in range(asked)]
        body["choices"][0]["logprobs"] = {"content": [{"token": "x", "logprob": -9.0, "top_logprobs": tops}]}
        return ok(body)

    with OpenAIServer(respond) as server:
        asking = engine(server, top_logprobs=wanted)
        asking.probe(lambda _: None)
        (answer,) = asking.generate([request(0).model_copy(update={"begun": True})])
    assert isinstance(answer, Generation)
    assert answer.tops is not None
    assert server.seen[-1].body["top_logprobs"] == limit


LOGITS = {"A": 2.0, "B": 0.0, "C": -1.0, "D": -3.0}


def reporting(scaled: bool) -> Callable[[Seen], Reply]:
    """A server whose log-probabilities are those at the request's temperature, or at 1."""

    def respond(seen: Seen) -> Reply:
        heat = (seen.body["temperature"] or 1.0) if scaled else 1.0
        total = math.log(sum(math.exp(logit / heat) for logit in LOGITS.values()))
        tops = [{"token": label, "logprob": logit / heat - total} for label, logit in LOGITS.items()]
        body = chat("A")
        body["usage"]["prompt_tokens"] = counted(seen)
        body["choices"][0]["logprobs"] = {"content": [{**tops[0], "top_logprobs": tops}]}
        return ok(body)

    return respond


def test_log_probabilities_that_the_temperature_scales_are_told_and_not_used() -> None:
    missing: list[str] = []
    with OpenAIServer(reporting(scaled=True)) as server:
        asking = engine(server, top_logprobs=20)
        for _ in range(2):  # also of an engine that knows already
            asking.probe(missing.append)
            assert asking.scales_logprobs
            assert "scales log-probabilities by the temperature" in missing.pop()
            assert missing == []
        assert [
            asked.text for asked in asking.generate([request(0, temperature=0.0), request(1, temperature=1.0)])
        ] == ["A"] * 2
        sent = len(server.seen)
        with pytest.raises(ServerError, match="question q sample 0: the server scales log-probabilities"):
            list(asking.generate([request(0, temperature=0.7)]))
        assert len(server.seen) == sent
        asking.top_logprobs = 0  # nothing is read from them
        assert len(list(asking.generate([request(0, temperature=0.7)]))) == 1
    with OpenAIServer(reporting(scaled=False)) as server:
        asking = engine(server, top_logprobs=20)
        asking.probe(missing.append)
        assert (asking.scales_logprobs, asking.can_continue, missing) == (False, True, [])


Template = Callable[[Body], str]


def chatml(body: Body, *, goes_on: bool = False, trims: bool = False) -> str:
    turns = [
        f"<s> {turn['role']} \n {turn['content'].strip() if trims else turn['content']}" for turn in body["messages"]
    ]
    begun = body["messages"][-1]["role"] == "assistant" and (goes_on or body.get("continue_final_message"))
    return " <e> \n ".join(turns) + ("" if begun else " <e> \n <s> assistant \n ")


def mistral(body: Body) -> str:
    """No generation prompt, one token ends a turn, and the wish to continue is not known."""
    return "<s> " + "".join(
        f"[INST] {turn['content']} [/INST] " if turn["role"] == "user" else f"{turn['content']} </s>"
        for turn in body["messages"]
    )


def llama(body: Body) -> str:
    """Leaves the generation prompt away on demand, but ends the turn all the same."""
    turns = "".join(f"<h> {turn['role']} </h> {turn['content']} <eot> " for turn in body["messages"])
    return turns + ("<h> assistant </h>" if body.get("add_generation_prompt", True) else "")


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (chatml, None),
        (partial(chatml, goes_on=True), None),  # llama.cpp continues a final message without being asked
        (partial(chatml, trims=True), "its chat template trims the message"),  # Llama 3, Gemma
        (lambda body: chatml({**body, "continue_final_message": False}), "ignores or refuses"),
        (mistral, "ignores or refuses"),
        (llama, "ignores or refuses"),
        (lambda _: "always as long", "ignores or refuses"),
    ],
)
def test_the_probe_believes_in_a_continuation_that_costs_the_text_and_nothing_else(
    template: Template, what: str | None
) -> None:
    def respond(seen: Seen) -> Reply:
        body = json.loads(reporting(scaled=False)(seen).payload)
        body["usage"]["prompt_tokens"] = len(re.findall(r"\S+|\n", template(seen.body)))
        return ok(body)

    missing: list[str] = []
    with OpenAIServer(respond) as server:
        asking = engine(server, top_logprobs=20)
        asking.probe(missing.append)
    assert asking.can_continue is (what is None)
    assert len(missing) == (what is not None)
    assert what is None or what in missing[0]


def test_certificates_that_are_not_there_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/certificates.pem")
    certificates.cache_clear()
    with pytest.raises(ServerError, match="No such file"):
        list(ServerEngine("http://127.0.0.1:9/v1", "m").generate([request()]))
    with pytest.raises(ServerError, match=r"does not list its models: .*No such file"):
        ServerEngine("http://127.0.0.1:9/v1", "").find_model()


def test_no_server_at_all_is_not_one_that_does_not_list_its_models() -> None:
    with OpenAIServer(by_seed) as server:
        url = server.url
    with pytest.raises(ServerError, match=r"/v1: no connection: .*refused$"):
        ServerEngine(url, "").find_model()


def test_no_further_request_is_sent_while_an_answer_waits_to_be_taken() -> None:
    """A caller that is slow to count must not pay for more than it has seen."""
    with OpenAIServer(by_seed) as server:
        arriving = engine(server, concurrency=1).generate([request(i) for i in range(6)])
        for taken in range(1, 4):
            next(arriving)
            time.sleep(0.2)  # enough for many requests on loopback
            assert len(server.seen) == taken
        arriving.close()  # type: ignore[attr-defined]


def test_done_keys_are_not_asked() -> None:
    with OpenAIServer(by_seed) as server:
        found = list(engine(server).generate([request(i) for i in range(4)], {("q", 0), ("q", 2)}))
    assert sorted(g.sample for g in found) == [1, 3]
    assert len(server.seen) == 2


def test_at_most_concurrency_requests_fly_at_once_and_all_places_are_used() -> None:
    """Twelve requests answered three at a time: fewer in flight would never fill the barrier."""
    three = threading.Barrier(3)

    def respond(seen: Seen) -> Reply:
        three.wait(60)
        return by_seed(seen)._replace(delay=0.05)

    with OpenAIServer(respond) as server:
        list(engine(server, concurrency=3).generate([request(i) for i in range(12)]))
    assert server.most_flying == 3


def test_generations_are_yielded_as_they_arrive() -> None:
    release = threading.Event()

    def respond(seen: Seen) -> Reply:
        if seen.body["seed"] == 100:
            release.wait(60)
        return by_seed(seen)

    with OpenAIServer(respond) as server:
        arriving = engine(server, concurrency=2).generate([request(i) for i in range(4)])
        assert sorted(next(arriving).sample for _ in range(3)) == [1, 2, 3]
        release.set()
        assert [g.sample for g in arriving] == [0]


def test_separate_reasoning_is_kept_and_a_thinking_deepseek_warns_once() -> None:
    reply = chat("<answer>\nB\n</answer>", model="deepseek-reasoner", reasoning_content="because")
    with OpenAIServer(lambda _: ok(reply)) as server:
        teacher = engine(server)
        with pytest.warns(UserWarning, match="temperature has no effect") as caught:
            found = [*teacher.generate([request(0), request(1)]), *teacher.generate([request(2)])]
    assert len(caught) == 1
    assert {(g.reasoning, g.temperature_acts) for g in found} == {("because", False)}


def test_reasoning_elsewhere_leaves_the_temperature_acting() -> None:
    reply = chat("B", model="deepseek-ai/DeepSeek-R1", reasoning="because")
    with OpenAIServer(lambda _: ok(reply)) as server:
        (found,) = engine(server).generate([request()])
    assert (found.reasoning, found.temperature_acts) == ("because", True)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://api.deepseek.com", True),
        ("https://api.deepseek.com/v1", True),
        ("https://notdeepseek.com", False),
        ("http://localhost:8000/v1", False),
    ],
)
def test_deepseek_is_told_by_its_host(url: str, expected: bool) -> None:
    reply = json.dumps(chat("B", model="deepseek-v4-pro", reasoning_content="because")).encode()

    async def asked() -> Generation:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=reply))
        async with httpx.AsyncClient(transport=transport) as client:
            return await ServerEngine(url, "m").ask(client, request())

    assert asyncio.run(asked()).temperature_acts is not expected


def test_thinking_that_ran_out_of_tokens_is_a_response_without_text() -> None:
    with OpenAIServer(lambda _: ok(chat(None, reasoning_content="on and on"))) as server:
        (found,) = engine(server).generate([request()])
    assert (found.text, found.reasoning) == ("", "on and on")
    assert len(server.seen) == 1


def test_keep_alive_blank_lines_before_the_reply_are_ignored() -> None:
    with OpenAIServer(lambda _: ok("\n\n  \n" + json.dumps(chat("B")))) as server:
        (found,) = engine(server).generate([request()])
    assert found.text == "B"


def test_a_models_path_is_asked_for_and_its_name_stored() -> None:
    path = "/models/tiny/Tiny-Q4.gguf"
    with OpenAIServer(lambda seen: ok(chat("x", model=path))) as server:
        asked = ServerEngine(server.url, path)
        (found,) = asked.generate([request()])
    assert server.seen[0].body["model"] == path
    assert isinstance(found, Generation)
    assert (found.model, asked.model) == ("Tiny-Q4.gguf", "Tiny-Q4.gguf")


@pytest.mark.parametrize(
    ("served", "stored"),
    [
        ("C:\\models\\Tiny.gguf", "Tiny.gguf"),
        ("/models/tiny/", "tiny"),
        *[(name, name) for name in ("Qwen/Qwen3-4B", "llama3:8b", "accounts/x/models/y", "m", "/")],
    ],
)
def test_only_a_path_is_shortened(served: str, stored: str) -> None:
    assert model_name(served) == stored


def test_top_logprobs_are_kept_with_the_drawn_token_and_their_mean() -> None:
    """Tokens at -0.5 and -1.5 mean -1; the second is not among its own top candidates and is added."""
    tokens = [
        {"token": "an", "logprob": -0.5, "top_logprobs": [{"token": "an", "logprob": -0.5}]},
        {"token": "swer", "logprob": -1.5, "top_logprobs": [{"token": "d", "logprob": -0.25}]},
    ]
    reply = chat("answer")
    reply["choices"][0]["logprobs"] = {"content": tokens}
    with OpenAIServer(lambda _: ok(reply)) as server:
        (found,) = engine(server, top_logprobs=2).generate([request()])
    assert (server.seen[0].body["logprobs"], server.seen[0].body["top_logprobs"]) == (True, 2)
    assert found.tops == (("an", {"an": -0.5}), ("swer", {"swer": -1.5, "d": -0.25}))
    assert found.mean_logprob is not None
    assert math.isclose(found.mean_logprob, -1.0)


def test_text_ends_after_the_first_stop_text_which_is_kept() -> None:
    with OpenAIServer(lambda _: ok(chat("one</a> two</b> three</a>"))) as server:
        (found,) = engine(server).generate([request(stop=("</b>", "</a>"))])
    assert found.text == "one</a>"
    assert "stop" not in server.seen[0].body


def test_extra_body_goes_into_the_request() -> None:
    with OpenAIServer(by_seed) as server:
        list(engine(server, extra_body={"thinking": {"type": "disabled"}}).generate([request()]))
    assert server.seen[0].body["thinking"] == {"type": "disabled"}


def test_it_works_inside_a_running_event_loop() -> None:
    async def notebook() -> list[str]:
        return [g.text for g in engine(server).generate([request()])]

    with OpenAIServer(by_seed) as server:
        assert asyncio.run(notebook()) == ["text 100"]


def test_scoring_token_ids_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="local engine"):
        ServerEngine("http://127.0.0.1:9/v1", "m").score([])


@pytest.mark.parametrize("options", [{"top_logprobs": 21}, {"concurrency": 0}, {"timeout": 0.0}, {"max_retries": -1}])
def test_arguments_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ServerEngine("http://127.0.0.1:9/v1", "m", **options)  # type: ignore[arg-type]
