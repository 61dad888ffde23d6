"""Read the logs of inspect_ai: `.eval` files, which are zip archives of JSON files."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from catto.errors import DataError, join_names, shorten_text
from catto.formats.columns import ColumnNames, Fields
from catto.formats.token_labels import read_label_token
from catto.io.tables import Rows, check_finished
from catto.io.text_files import MAX_JSON_BYTES, check_value_count, open_input, parse_object

ZSTANDARD = 93  # a compression method that Python's zipfile supports only from 3.14 on
HEADER = "header.json"
CHUNK_BYTES = 1 << 20  # decompressed at a time
LOCAL_HEADER_BYTES = 30  # size of the header in front of each file in a zip archive
# inspect_ai's grades for a right, a wrong and a missing answer. Its "P", partially right, has no boolean value.
INSPECT_VALUES = {"C": True, "I": False, "N": False}
# Fields that catto's scorer stores next to the confidence in the metadata of a score.
STATED_WITH_CONFIDENCE = ("source", "label_logprobs")
SENTENCEPIECE_SPACE = "\u2581"


def _map_characters_to_bytes() -> dict[str, int]:
    """Map each character of a byte-level vocabulary to the byte that it encodes, as GPT-2 does.

    A visible Latin-1 character encodes its own byte. The other bytes are encoded, in order, as the characters from 256
    on: a space (byte 32) as Ġ, character 288.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xFF + 1)}
    visible.remove(0xAD)  # the soft hyphen
    byte_of_character = {}
    next_substitute = 256
    for byte in range(256):
        if byte in visible:
            byte_of_character[chr(byte)] = byte
        else:
            byte_of_character[chr(next_substitute)] = byte
            next_substitute += 1
    return byte_of_character


BYTE_OF_CHARACTER = _map_characters_to_bytes()


def is_inspect(record: Fields) -> bool:
    """Whether inspect_ai wrote the record."""
    return {"epoch", "scores", "output"} <= record.keys()


def read_samples(path: Path) -> Rows:
    """Yield the samples of an inspect_ai log, a zip archive of JSON files compressed with deflate or Zstandard.

    Args:
        path: The `.eval` file.

    Yields:
        (sample number from 1, sample); nothing if the log has no samples.

    Raises:
        DataError: While iterating: the file is broken or too large, or the run failed or did not finish.
    """
    with open_input(path) as file:
        try:
            with zipfile.ZipFile(file) as log:
                _check_header(path, file, log)
                members = [member for member in log.infolist() if member.filename.startswith("samples/")]
                for number, member in enumerate(members, 1):
                    text = _decompress_member(path, number, file=file, log=log, member=member).decode()
                    check_value_count(path, number, text)
                    yield number, parse_object(path, number, text)
        # zipfile raises NotImplementedError for features of an archive that it does not support.
        except (zipfile.BadZipFile, zlib.error, UnicodeDecodeError, NotImplementedError) as error:
            raise DataError(path, None, f"broken zip file: {error}") from None


def _check_header(path: Path, file: IO[bytes], log: zipfile.ZipFile) -> None:
    """Raise DataError if the run failed or did not finish.

    inspect_ai writes the header at the end of a run. Until then, the log has a journal instead. A log with neither of
    them is not checked.
    """
    names = log.namelist()
    if HEADER in names:
        text = _decompress_member(path, None, file=file, log=log, member=log.getinfo(HEADER)).decode()
        check_finished(path, parse_object(path, 1, text))
        return
    has_journal = any(name.startswith("_journal/") for name in names)
    if has_journal:
        check_finished(path, {"status": "started"})  # the status that the header would have; raises DataError


def _decompress_member(
    path: Path, row: int | None, *, file: IO[bytes], log: zipfile.ZipFile, member: zipfile.ZipInfo
) -> bytes:
    """Return the content of a file inside a log.

    The sizes that the archive states may be wrong, so the decompressed bytes are counted.

    Args:
        path: The log, for error messages.
        row: The number of the sample, for error messages; None for the header.
        file: The log as a stream of bytes, from which `log` reads too.
        log: The log as a zip archive.
        member: The file inside the log.

    Raises:
        DataError: The compression method is not supported, or the decompressed content is too large.
    """
    if member.compress_type == ZSTANDARD:
        stream = _open_zstandard(file, member)
    elif member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        stream = log.open(member)
    else:  # zipfile can read other methods, but without a limit on the decompressed size
        method = member.compress_type
        raise DataError(path, row, f"compressed with method {method}, expected deflate or Zstandard")
    content = bytearray()
    with stream:
        while True:
            chunk = stream.read(CHUNK_BYTES)
            if not chunk:
                return bytes(content)
            content += chunk
            if len(content) > MAX_JSON_BYTES:
                raise DataError(path, row, f"larger than {MAX_JSON_BYTES // 2**20} MB")


def _open_zstandard(file: IO[bytes], member: zipfile.ZipInfo) -> Any:
    """Return a stream that decompresses a Zstandard-compressed file inside a log.

    Args:
        file: The log. Its position changes; zipfile sets the position itself before it reads.
        member: The file inside the log.
    """
    import pyarrow as arrow

    # The file begins with a header of fixed size, the name and an extra field; the compressed bytes follow. The last
    # four bytes of the header are the lengths of the name and of the extra field.
    file.seek(member.header_offset)
    header = file.read(LOCAL_HEADER_BYTES)
    if len(header) < LOCAL_HEADER_BYTES:
        raise zipfile.BadZipFile("a file starts beyond the end of the archive")
    name_length, extra_length = struct.unpack("<HH", header[-4:])
    file.seek(name_length + extra_length, os.SEEK_CUR)
    compressed = file.read(member.compress_size)
    return arrow.input_stream(arrow.py_buffer(compressed), compression="zstd")


def read_inspect(record: Fields, names: ColumnNames) -> dict[str, Any]:
    """Read the question, the grade and the confidence of a sample.

    The confidence is the one in the metadata of the score, or else the probability of the answer's token.

    Args:
        record: The sample.
        names: The columns the user named. If the sample has several scores, `correct` names the scorer.

    Returns:
        catto's own fields. The grade is in the column `names.correct`. `confidence` is not set if the sample has
        neither of the two confidences and the user named a different column.

    Raises:
        KeyError: A field is missing.
        ValueError: No score can be chosen, or the confidence is missing or cannot be read.
    """
    score = _choose_score(record, names)
    answer = _read_grade(record, score, names.correct)
    metadata = score.get("metadata") or {}
    if metadata.get("confidence") is not None:
        return answer | _read_stated_confidence(metadata)
    tokens = _find_reply_tokens(record)
    if tokens:
        return answer | _read_token_confidence(record, score, tokens)
    if names.has_default_confidence:
        raise ValueError(
            "found neither metadata.confidence in scores nor logprobs in output.choices.0: name a --confidence"
        )
    return answer


def _read_grade(sample: Fields, score: Fields, correct_name: str) -> dict[str, Any]:
    """Return the question, its grade in the field `correct_name`, and the graded label and the gold label if known."""
    value = score["value"]
    graded_label = score.get("answer") or None
    answer: dict[str, Any] = {"question": str(sample["id"])}
    answer[correct_name] = INSPECT_VALUES.get(str(value), value)
    if graded_label is not None:
        answer["label"] = graded_label
    target = sample.get("target")
    if isinstance(target, str):  # a list has several right answers, none of which is the gold label
        answer["gold"] = target
    return answer


def _read_stated_confidence(metadata: Fields) -> dict[str, Any]:
    """Return the confidence in the metadata of a score, and the fields that catto's scorer stores next to it."""
    stated: dict[str, Any] = {"confidence": metadata["confidence"]}
    is_from_cattos_scorer = metadata.get("source") in ("free", "plain", "fallback")
    if is_from_cattos_scorer:
        stated |= {name: metadata[name] for name in STATED_WITH_CONFIDENCE if name in metadata}
    return stated


def _read_token_confidence(sample: Fields, score: Fields, tokens: Sequence[Fields]) -> dict[str, Any]:
    """Return the probability of the graded answer from the tokens of a sample's first reply."""
    graded_label = score.get("answer") or None
    labels = _list_choice_labels(sample)
    is_open_question = not labels
    if is_open_question:
        labels = [str(score.get("answer"))]  # a single label means an open answer
    reply = read_message_text(sample["output"]["choices"][0]["message"]["content"])
    return read_reply_tokens(tokens, reply, labels, graded_label)


def read_message_text(content: object) -> str:
    """Return the text of a message's content, a string or a list of parts; empty for any other content."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") == "text":
            texts.append(str(part.get("text")))
    return "".join(texts)


def read_reply_tokens(
    tokens: Sequence[Fields], reply: str, labels: Sequence[str], graded_label: str | None
) -> dict[str, Any]:
    """Read the probability of the answer at the token where the label begins.

    inspect_ai's own Transformers engine logs tokens as the vocabulary writes them, such as `ĠB` for ` B`. For a reply
    in a batch, it also logs the tokens after the end, up to the length of the longest reply. Such tokens are first
    converted to text, and those after the reply are dropped.

    Args:
        tokens: The logged tokens of the reply.
        reply: The text of the reply.
        labels: The labels of the question; a single label means an open answer.
        graded_label: The answer that was graded; None if the reply gives no answer.

    Returns:
        `label`, `confidence` and `source`, and `label_logprobs` if every label has a log-probability. Without a graded
        label, `label` is None, the source is `fallback`, and the confidence is the probability of the whole reply.

    Raises:
        KeyError: A token has no `token` or `logprob`.
        ValueError: The tokens contain no label, the token at its beginning does not identify it, or the graded label
            has no log-probability at that token.
    """
    decoded = _decode_tokens(tokens)
    tokens_of_reply = _drop_tokens_after_reply(decoded, reply)
    return read_label_token(tokens_of_reply, labels, graded_label)


def _decode_tokens(tokens: Sequence[Fields]) -> Sequence[Fields]:
    """Convert tokens as the vocabulary writes them to text; return tokens that are already text unchanged.

    Either all tokens of a reply are text, or none is. The `bytes` of a text are between 0 and 255. For a token of the
    vocabulary, inspect_ai logs the code points of its characters there. Characters such as Ġ and ▁ are above 255, and
    at least one token of a reply contains such a character.
    """
    highest_bytes = [max(token.get("bytes") or (0,)) for token in tokens]
    are_texts = max(highest_bytes, default=0) < 256
    if are_texts:
        return tokens
    decoded = []
    for token in tokens:
        candidates = []
        for candidate in token.get("top_logprobs") or ():
            candidates.append({**candidate, "token": decode_vocabulary_form(candidate["token"])})
        decoded.append({**token, "token": decode_vocabulary_form(token["token"]), "top_logprobs": candidates})
    return decoded


def decode_vocabulary_form(token: str) -> str:
    """Return the text of a token of a byte-level or SentencePiece vocabulary.

    A byte that is only a part of a character becomes \ufffd. A token with characters of neither kind, such as `日`, is
    returned unchanged.

    >>> decode_vocabulary_form("\u0120B"), decode_vocabulary_form("\u2581B"), decode_vocabulary_form("<|im_end|>")
    (' B', ' B', '<|im_end|>')
    """
    if SENTENCEPIECE_SPACE in token:
        return token.replace(SENTENCEPIECE_SPACE, " ")
    text_bytes = bytearray()
    for character in token:
        byte = BYTE_OF_CHARACTER.get(character)
        if byte is None:  # not a token of a byte-level vocabulary
            return token
        text_bytes.append(byte)
    return text_bytes.decode(errors="replace")


def _drop_tokens_after_reply(tokens: Sequence[Fields], reply: str) -> Sequence[Fields]:
    """Return the tokens up to the end of the reply; all tokens if their text does not begin with the reply."""
    text = "".join(token["token"] for token in tokens)
    reply = reply.strip()
    reply_start = len(text) - len(text.lstrip())
    if not text.startswith(reply, reply_start):
        return tokens
    reply_end = reply_start + len(reply)
    token_end = 0
    for number, token in enumerate(tokens, 1):
        token_end += len(token["token"])
        if token_end >= reply_end:
            return tokens[:number]
    return tokens


def _choose_score(sample: Fields, names: ColumnNames) -> Fields:
    """Return the score of the scorer `names.correct`, or the only score; raise ValueError if there is no such score."""
    scores: Mapping[str, Fields] = sample.get("scores") or {}
    if names.correct in scores:
        return scores[names.correct]
    if not scores:
        raise ValueError(_explain_missing_scores(sample))
    if len(scores) > 1:
        raise ValueError(f"scores: name one of {join_names(list(scores))} with --correct")
    [score] = scores.values()
    return score


def _find_reply_tokens(sample: Fields) -> Sequence[Fields]:
    """Return the logged tokens of the first reply; empty if there are none."""
    replies = sample["output"]["choices"]
    if not replies:
        return ()
    logprobs = replies[0].get("logprobs") or {}
    return logprobs.get("content") or ()


def _list_choice_labels(sample: Fields) -> list[str]:
    """Return A, B, ... for the choices of a sample; empty for an open question."""
    choice_count = len(sample.get("choices") or ())
    return [letter_of(number) for number in range(choice_count)]


def letter_of(number: int) -> str:
    """Return the letter of a choice, as inspect_ai writes it: A to Z, then 1, 2, ...

    >>> letter_of(1), letter_of(26)
    ('B', '1')
    """
    if number < 26:
        return chr(ord("A") + number)
    return str(number - 25)


def _explain_missing_scores(sample: Fields) -> str:
    error = sample.get("error")
    if isinstance(error, dict) and error.get("message"):
        return f"the sample failed: {shorten_text(str(error['message']), 200)}"
    return "scores: empty"
