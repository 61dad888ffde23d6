"""The `catto` object through clients that rebuild replies: LangChain's ChatOpenAI and LiteLLM."""

from __future__ import annotations

from typing import Any

import pytest

from needs import REASONS, needs

pytest.importorskip("fastapi", reason=REASONS["serve"])

from gateway_world import MODEL, always, gateway, threshold
from openai_server import OpenAIServer

pytestmark = [
    pytest.mark.slow,
    needs("clients"),
    # The clients warn about their own dependencies.
    pytest.mark.filterwarnings("ignore"),
]

QUESTION = "Which?"
OPTIONS = {"catto": {"options": {"A": "", "B": ""}}}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def check_object(about: Any) -> None:
    """The answer is B with exp(-0.25) = 0.7788, at a threshold of 0.5."""
    assert about["label"] == "B"
    assert about["confidence"] == pytest.approx(0.7788, abs=1e-4)
    assert about["guarantee"] == {"risk": 0.05, "confidence_level": 0.95, "coverage": 0.7}
    assert not about["abstained"]


def test_langchain_keeps_the_object_in_replies_and_streams() -> None:
    from langchain_openai import ChatOpenAI

    with OpenAIServer(always("B")) as upstream, gateway(upstream, limit=threshold(0.5)) as url:
        model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, extra_body=OPTIONS)
        reply = model.invoke(QUESTION)
        chunks = list(model.stream(QUESTION))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined = joined + chunk
    for message in (reply, joined):
        assert message.content == "<answer>\nB\n</answer>"
        check_object(message.response_metadata["logprobs"]["catto"])


def test_litellm_keeps_the_object_in_replies_and_streams() -> None:
    import litellm

    with OpenAIServer(always("B")) as upstream, gateway(upstream, limit=threshold(0.5)) as url:
        messages = [{"role": "user", "content": QUESTION}]
        call: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
        reply = litellm.completion(messages=messages, extra_body=OPTIONS, **call)
        chunks = list(litellm.completion(messages=messages, extra_body=OPTIONS, stream=True, **call))
    check_object(reply.choices[0].logprobs.catto)
    found = []
    for chunk in chunks:
        logprobs = chunk.choices[0].logprobs
        if logprobs is not None:
            found.append(logprobs.catto)
    assert len(found) == 1
    check_object(found[0])
