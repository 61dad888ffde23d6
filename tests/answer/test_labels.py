"""Labels in token ids: found by decoding prefixes, on tokenizers of every kind, in every form that answers come in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import FUSED, WORDS, byte_level, firsts, kinds, wrapped
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from catto.answer.response import parse_response
from catto.answer.tokens import TAIL, check_labels, encode_opening, find_label_token, find_token, locate_label
from catto.prompts import render_completion
from catto.token_ids import decode_ids

LETTERS = tuple("ABCD")
KINDS = tuple(kinds())
READS_ALL = tuple(name for name in KINDS if name not in ("unigram", "word-level"))  # no character is unknown
FORMS = (
    "<answer>\n{}\n</answer>",
    "<answer>{}</answer>",
    "<answer> {}</answer>",
    "<answer>\n({})",
    "<answer>\nthe answer is **{}**\n</answer>",
    "<answer>\nnot\n</answer>\n<answer>{}",
)


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_exchanging_the_token_exchanges_the_label(name: str, form: str) -> None:
    tokenizer = kinds()[name]
    ids = encode(tokenizer, render_completion("the cat sat", None).removesuffix("<answer>\n") + form.format("C"))
    place = locate_label(tokenizer, ids, LETTERS)
    assert place is not None
    assert place.label == "C"
    assert firsts(place)["C"] == ids[len(place.ids_before)]
    assert tuple(firsts(place)) == LETTERS
    for label, token in firsts(place).items():
        other = [*ids[: len(place.ids_before)], token, *ids[len(place.ids_before) + 1 :]]
        assert decode_ids(tokenizer, other) == decode_ids(tokenizer, ids).replace("C", label)


@pytest.mark.parametrize("name", KINDS)
def test_words_are_found_at_their_first_token(name: str) -> None:
    tokenizer = kinds()[name]
    for word in WORDS:
        ids = encode(tokenizer, render_completion("it is so", word))
        index, candidates = find_label_token(tokenizer, ids, WORDS)
        before = decode_ids(tokenizer, ids[:index])
        assert decode_ids(tokenizer, ids)[len(before) :].startswith(word)
        assert ids[index] == candidates[WORDS.index(word)]
        for other, token in zip(WORDS, candidates, strict=True):
            begun = decode_ids(tokenizer, [*ids[:index], token])[len(before) :]
            assert begun
            assert other.startswith(begun)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(READS_ALL),
    reasoning=st.text(st.sampled_from("ab é猫🐈\n.<>A"), max_size=40),
    form=st.sampled_from(FORMS),
)
def test_the_token_found_holds_the_parsers_character(name: str, reasoning: str, form: str) -> None:
    tokenizer = kinds()[name]
    text = f"<think>\n{reasoning}\n</think>\n" + form.format("B")
    ids = encode(tokenizer, text)
    assert decode_ids(tokenizer, ids) == text
    place, parsed = locate_label(tokenizer, ids, LETTERS), parse_response(text, LETTERS)
    assert parsed.span is not None
    assert place is not None
    start = parsed.span[0]
    assert len(decode_ids(tokenizer, ids[: len(place.ids_before)]).rstrip("\ufffd")) <= start
    assert decode_ids(tokenizer, ids[: len(place.ids_before) + 1])[: start + 1] == text[: start + 1]


def test_a_character_of_several_tokens_belongs_to_the_one_that_completes_it() -> None:
    tokenizer = kinds()["byte-level"]
    ids = encode(tokenizer, "🐾A")
    last = len(ids) - 1
    assert last > 1
    assert find_token(tokenizer, ids, "🐾A", 0) == (last - 1, 0)
    assert find_token(tokenizer, ids, "🐾A", 1) == (last, 1)


@pytest.mark.parametrize("name", KINDS)
def test_searching_the_tail_first_finds_the_same_token(name: str) -> None:
    tokenizer = kinds()[name]
    ids = encode(tokenizer, "the cat sat 🐈 on the mat\n" * 8 + "<answer>\nthe answer is (B)\n</answer>")
    text = decode_ids(tokenizer, ids)
    assert len(ids) > 50
    for position in range(len(text)):
        assert find_token(tokenizer, ids, text, position) == find_token(tokenizer, ids, text, position, tail=len(ids))


@pytest.mark.parametrize("name", KINDS)
def test_the_first_token_of_the_tail_keeps_its_space(name: str) -> None:
    """Decoding the tail alone may trim it: whichever token stands first there, its character begins where it did."""
    tokenizer = kinds()[name]
    whole = encode(tokenizer, "the cat sat on the mat and the dog did not\n" * 12 + "<answer>\nB\n</answer>")
    for end in range(len(whole) - 16, len(whole)):
        ids = whole[:end]
        text, tail = decode_ids(tokenizer, ids), len(decode_ids(tokenizer, ids[:-TAIL]))
        assert 0 < tail < len(text) - 4
        for position in range(tail, tail + 4):
            assert find_token(tokenizer, ids, text, position) == find_token(
                tokenizer, ids, text, position, tail=len(ids)
            )


def test_fused_tokens_keep_their_lead() -> None:
    tokenizer = kinds()["byte-level, >A is one token"]
    ids = encode(tokenizer, "<answer>A</answer>")
    place = locate_label(tokenizer, ids, LETTERS)
    assert place is not None
    assert tokenizer.convert_ids_to_tokens(list(firsts(place).values())) == [">A", ">B", ">C", ">D"]
    ids = encode(kinds()["byte-level, newline and letter are one token"], "<answer>\nA\n</answer>")
    place = locate_label(kinds()["byte-level, newline and letter are one token"], ids, LETTERS)
    assert place is not None
    assert decode_ids(kinds()["byte-level, newline and letter are one token"], [firsts(place)["D"]]) == "\nD"


def test_generated_tokens_are_never_tokenised_again() -> None:
    """A model may write ">" and "A" where the tokenizer would write ">A": the candidates are then plain letters."""
    tokenizer = kinds()["byte-level, >A is one token"]
    ids = [*encode(tokenizer, "<answer"), *tokenizer.convert_tokens_to_ids([">", "A"]), *encode(tokenizer, "</answer>")]
    assert ids != encode(tokenizer, "<answer>A</answer>")
    place = locate_label(tokenizer, ids, LETTERS)
    assert place is not None
    assert ids[len(place.ids_before)] == tokenizer.convert_tokens_to_ids("A")
    assert tokenizer.convert_ids_to_tokens(list(firsts(place).values())) == list("ABCD")


def test_a_word_in_unusual_pieces_keeps_its_rivals_own_first_tokens() -> None:
    tokenizer = kinds()["byte-level"]
    usual = encode(tokenizer, "<answer>\nneutral")
    ids = [*usual[:-1], *tokenizer.convert_tokens_to_ids(list("neutral"))]
    place, normal = locate_label(tokenizer, ids, WORDS), locate_label(tokenizer, usual, WORDS)
    assert place is not None
    assert normal is not None
    assert firsts(place) == {**firsts(normal), "neutral": tokenizer.convert_tokens_to_ids("n")}


def test_the_case_of_the_answer_is_the_case_of_its_rivals() -> None:
    tokenizer = kinds()["byte-level"]
    place = locate_label(tokenizer, encode(tokenizer, "<answer>\nb\n</answer>"), LETTERS)
    assert place is not None
    assert place.label == "B"
    assert tokenizer.convert_ids_to_tokens(list(firsts(place).values())) == list("abcd")


def test_a_label_without_a_token_of_that_form_is_no_candidate() -> None:
    """Only ">A" and ">B" are tokens here: after a fused ">A" no single token begins C."""
    tokenizer = byte_level([text for text in FUSED if text[-1] in "AB"])
    place = locate_label(tokenizer, encode(tokenizer, "<answer>A</answer>"), ("A", "B", "C"))
    assert place is not None
    assert tuple(firsts(place)) == ("A", "B")
    with pytest.raises(ValueError, match="label 'C' has no token like that of 'A'"):
        find_label_token(tokenizer, encode(tokenizer, "<answer>A</answer>"), ("A", "B", "C"))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("text", ["<answer>\nA or B\n</answer>", "a cat A", "<answer>\nE\n</answer>", "<answer>\n"])
def test_no_answer_is_no_place(name: str, text: str) -> None:
    assert locate_label(kinds()[name], encode(kinds()[name], text), LETTERS) is None


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("labels", [LETTERS, WORDS])
def test_the_opening_and_a_rendered_row_agree(name: str, labels: tuple[str, ...]) -> None:
    """Constrained answering and training meet the same tokens after the same context."""
    tokenizer = kinds()[name]
    start = encode_opening(tokenizer, render_completion("the cat sat", None), labels)
    for label in labels:
        ids = encode(tokenizer, "a" + render_completion("the cat sat", label))
        index, candidates = find_label_token(tokenizer, ids, labels)
        assert tuple(ids[index - len(start.ids_before) : index]) == start.ids_before
        assert candidates == tuple(firsts(start).values())


def words_only(*words: str) -> Any:
    vocabulary = {word: place for place, word in enumerate(["<unk>", "<pad>", "<eos>", *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>", continuing_subword_prefix=""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return wrapped(tokenizer, unk_token="<unk>")


def test_labels_that_share_their_first_token_are_refused() -> None:
    tokenizer = words_only(*"abcdefghijklmnopqrstuvwxyz\n <>/", "ent", "ailment", "itled")
    with pytest.raises(ValueError, match=r"'entailment' and 'entitled' begin with the same token 'ent' after .*answer"):
        check_labels(tokenizer, ("entailment", "neutral", "entitled"))
    check_labels(tokenizer, WORDS)


def test_labels_fused_with_the_bracket_must_differ_too() -> None:
    """`>e` is one token here, so "entailment" and "entitled" differ after a newline but not after "<answer>"."""
    tokenizer = words_only(*"abcdefghijklmnopqrstuvwxyz\n <>/", "entailment", "entitled", ">e")
    assert len(encode_opening(tokenizer, "<answer>\n", ("entailment", "entitled")).paths) == 2
    with pytest.raises(ValueError, match="begin with the same token '>e'"):
        check_labels(tokenizer, ("entailment", "entitled"))


def test_labels_with_a_common_first_token_are_not_told_apart_by_their_second() -> None:
    with pytest.raises(ValueError, match="begin with the same token"):
        check_labels(kinds()["byte-level"], ("option1", "option2"))


def test_a_label_that_the_vocabulary_cannot_write_is_refused() -> None:
    with pytest.raises(ValueError, match="does not read label 'Z' back"):
        check_labels(kinds()["word-level"], ("A", "Z"))


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_tells_letters_and_nli_words_apart(name: str) -> None:
    check_labels(kinds()[name], LETTERS)
    check_labels(kinds()[name], WORDS)
