"""Prompts, the one ending, and chat templates."""

from __future__ import annotations

import pytest
from answer_cases import LETTERS, NLI, laws, question
from hypothesis import given
from hypothesis import strategies as st

from catto.answer.response import parse_response
from catto.prompts import WORDING, fold_system, prompt_text, render_completion, render_messages
from catto.records import Message

# The prompt


@pytest.mark.parametrize("task", [*WORDING, "a file of mine"])
def test_the_system_message_gives_the_number_of_choices_and_the_user_message_every_option(task: str) -> None:
    system, user = render_messages(question(task=task))
    assert "4" in system.content
    assert user.content == "Why?\n\nA) text A\nB) text B\nC) text C\nD) text D"


@pytest.mark.parametrize("task", [task for task in [*WORDING, "mine"] if task != "witnesses"])
def test_the_form_that_is_asked_for_is_the_form_that_is_rendered(task: str) -> None:
    """The end of the system message is a completion whose reasoning and label are placeholders."""
    asked = render_messages(question(task=task))[0].content
    assert asked.endswith(render_completion("your reasoning", "A, B, C or D"))
    first = render_messages(question(task=task), reasoning=False)[0].content
    assert first.endswith("\n" + render_completion(None, "A, B, C or D"))
    assert "<think>" not in first


def test_the_embedded_world_has_a_very_short_prompt() -> None:
    system, _ = render_messages(question(task="witnesses"))
    assert len(system.content) < 40
    assert system != render_messages(question(task="witnesses"), reasoning=False)[0]


def test_nli_has_no_letters() -> None:
    system, user = render_messages(question(NLI, NLI, task="snli", fields={"premise": "P.", "hypothesis": "H."}))
    assert user.content == "Premise: P.\nHypothesis: H.\n\nLabels: entailment, neutral, contradiction"
    assert "<answer>\nentailment, neutral or contradiction\n</answer>" in system.content


def test_options_of_several_lines_are_set_apart() -> None:
    _, user = render_messages(question(("A", "B"), ("one\ntwo", "three")))
    assert user.content.endswith("A) one\ntwo\n\nB) three")


# The ending


def test_the_ending_is_the_canonical_one() -> None:
    assert render_completion("because", "B") == "<think>\nbecause\n</think>\n<answer>\nB\n</answer>"
    assert render_completion(None, "B") == "<answer>\nB\n</answer>"
    assert render_completion("because", None) == "<think>\nbecause\n</think>\n<answer>\n"


@laws
@given(st.text(max_size=80), st.sampled_from([*LETTERS]))
def test_a_rendered_response_reads_back(reasoning: str, label: str) -> None:
    text = render_completion(reasoning, label)
    found = parse_response(text, LETTERS)
    assert found.label == label
    assert render_completion(found.reasoning or "", label) == text
    assert found.span == (len(text) - len("\n</answer>") - 1, len(text) - len("\n</answer>"))


@laws
@given(st.lists(st.sampled_from(["<think>", "</think>", "<ANSWER>", "</answer>", "x", "\n", "B"]), max_size=12))
def test_tags_inside_the_reasoning_are_taken_out(parts: list[str]) -> None:
    text = render_completion("".join(parts), "A")
    assert [text.lower().count(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>")] == [1, 1, 1, 1]


# Chat templates


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
OPENS_THINK = CHATML + "<think>\n"
EMPTY_THINK = CHATML + "<think>\n\n</think>\n\n"
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
DROPS = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
CHAT = (Message(role="system", content="S"), Message(role="user", content="U"))


def tokenizer(template: str) -> object:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="x", chat_template=template)


@pytest.mark.parametrize("template", [CHATML, THINKING, OPENS_THINK, EMPTY_THINK])
def test_the_prompt_ends_at_the_bare_start_of_the_assistants_turn(template: str) -> None:
    text = prompt_text(CHAT, tokenizer(template))  # type: ignore[arg-type]
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("template", [REFUSES, DROPS])
def test_without_a_system_role_its_text_goes_before_the_users(template: str) -> None:
    text = prompt_text(CHAT, tokenizer(template))  # type: ignore[arg-type]
    assert text == "<|im_start|>user\nS\n\nU<|im_end|>\n<|im_start|>assistant\n"


def test_folding_leaves_a_chat_without_system_alone() -> None:
    assert fold_system(CHAT[1:]) == CHAT[1:]
