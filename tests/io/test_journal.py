"""The one resumable file: what is stored survives every kill, what is another run's is refused, publishing is whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from catto.errors import DataError
from catto.io.journal import Journal, read_refusals
from catto.io.record_files import manifest_path, read_manifest, read_records
from catto.io.text_files import MAX_LINE_BYTES
from catto.records import Manifest, Refusal, Response

KEYS = [(f"q{i}", sample) for i in range(3) for sample in range(2)]


def run(name: str = "one", **counts: int) -> Manifest:
    return Manifest(kind="responses", counts=counts, recipe_hash=name)


def journal(folder: Path, name: str = "one") -> Journal[Response]:
    refused = folder / "a.refused.jsonl"
    return Journal(
        folder / "a.jsonl", Response, run(name), KEYS, refused=refused, other_run_error="belongs to another run"
    )


def response(question: str, sample: int, text: str = "A") -> Response:
    return Response(question=question, sample=sample, text=text, correct=True, model="m")


def refusal(question: str, sample: int) -> Refusal:
    return Refusal(refused="flagged", question=question, sample=sample)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_is_published_in_the_order_of_the_keys_whatever_came_first(tmp_path: Path) -> None:
    with journal(tmp_path) as file:
        assert not file.finished()
        for key in (KEYS[4], KEYS[0], KEYS[3]):
            file.append(response(*key))
        file.append(refusal(*KEYS[1]), response(*KEYS[5]), sync=True)
        assert [one.key for one in file.outcomes()] == [KEYS[i] for i in (0, 1, 3, 4, 5)]
        file.publish(run(responses=4))
    assert file.finished()
    assert list(read_records(tmp_path / "a.jsonl", Response)) == [response(*KEYS[i]) for i in (0, 3, 4, 5)]
    assert read_refusals(tmp_path / "a.refused.jsonl") == [refusal(*KEYS[1])]
    assert read_manifest(tmp_path / "a.jsonl").counts == {"responses": 4}
    assert names(tmp_path) == ["a.jsonl", "a.manifest.json", "a.refused.jsonl"]
    with pytest.raises(DataError, match=r"a\.jsonl: belongs to another run"):
        journal(tmp_path, "two").finished()


def test_cut_anywhere_it_holds_the_whole_lines_and_goes_on(tmp_path: Path) -> None:
    with journal(tmp_path) as file:
        file.append(response(*KEYS[0], "ü\u2028"))
        file.append(refusal(*KEYS[1]))
        file.append(response(*KEYS[2]))
    whole = file.part.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for size in sorted(
        {*range(0, len(whole), 25), *(end + off for end in ends[:-1] for off in (-1, 0, 1)), ends[-1] - 1}
    ):
        file.part.write_bytes(whole[:size])
        stored = whole[:size].count(b"\n")
        with journal(tmp_path) as again:
            assert list(again.places) == KEYS[:stored]
            assert len(again.refused) == (stored > 1)
            again.append(*[response(*key, "ü\u2028") for key in KEYS[:1] if stored < 1])
            again.append(*[refusal(*key) for key in KEYS[1:2] if stored < 2])
            again.append(*[response(*key) for key in KEYS[2:3] if stored < 3])
        assert file.part.read_bytes() == whole


def test_reading_writes_nothing(tmp_path: Path) -> None:
    absent = journal(tmp_path)
    absent.read()
    assert (absent.places, names(tmp_path)) == ({}, [])
    with journal(tmp_path) as file:
        file.append(response(*KEYS[0]))
    torn = file.part.read_bytes() + b'{"question": "q'
    file.part.write_bytes(torn)
    absent.read()
    assert list(absent.places) == KEYS[:1]
    assert file.part.read_bytes() == torn


def test_another_runs_journal_is_refused_unless_it_stores_no_record(tmp_path: Path) -> None:
    with journal(tmp_path) as file:
        file.append(refusal(*KEYS[0]))
    with journal(tmp_path, "two") as other:
        assert not other.places
        other.append(response(*KEYS[0]))
    before = other.part.read_bytes()
    with pytest.raises(DataError, match=r"a\.part\.jsonl: belongs to another run"):
        journal(tmp_path).__enter__()
    assert other.part.read_bytes() == before
    with journal(tmp_path, "two") as other:
        assert list(other.places) == KEYS[:1]


def test_a_foreign_file_is_never_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "a.part.jsonl").write_text('{"mine": 1}\n')
    with pytest.raises(DataError, match=r"a\.part\.jsonl: has no manifest next to it"):
        journal(tmp_path).__enter__()
    assert (tmp_path / "a.part.jsonl").read_text() == '{"mine": 1}\n'
    (tmp_path / "a.part.jsonl").unlink()
    (tmp_path / "a.jsonl").write_text('{"mine": 1}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: has no manifest next to it"):
        journal(tmp_path).__enter__()
    assert names(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (response(*KEYS[0]).model_dump_json(), "question q0 sample 0 is stored twice"),
        (refusal(*KEYS[0]).model_dump_json(), "question q0 sample 0 is stored twice"),
        (response("q9", 0).model_dump_json(), "question q9 sample 0 was not asked"),
        ('{"question": "q1", "sample": 0}', "text: missing"),
        ("not json", "Invalid JSON"),
    ],
)
def test_a_bad_line_is_named_and_left_alone(tmp_path: Path, line: str, message: str) -> None:
    with journal(tmp_path) as file:
        file.append(response(*KEYS[0]))
    broken = file.part.read_bytes() + line.encode() + b"\n"
    file.part.write_bytes(broken)
    with pytest.raises(DataError, match=rf"a\.part\.jsonl row 2: .*{message}"):
        journal(tmp_path).__enter__()
    assert file.part.read_bytes() == broken


def test_two_runs_never_write_the_same_journal(tmp_path: Path) -> None:
    with (
        journal(tmp_path),
        pytest.raises(DataError, match=r"a\.part\.jsonl: another run is writing here"),
        journal(tmp_path),
    ):
        pass
    with journal(tmp_path):  # it was let go
        pass


def test_a_record_is_stored_once_and_replaces_a_refusal(tmp_path: Path) -> None:
    with journal(tmp_path) as file:
        file.append(refusal(*KEYS[0]), response(*KEYS[1]))
        with pytest.raises(ValueError, match="question q0 sample 1 is stored already"):
            file.append(response(*KEYS[1]))
        file.append(response(*KEYS[0]))
        assert not file.refused
    with journal(tmp_path) as file:
        assert not file.refused
        assert list(file.outcomes()) == [response(*KEYS[0]), response(*KEYS[1])]


def test_what_is_too_long_to_be_read_back_is_stored_as_a_refusal(tmp_path: Path) -> None:
    with journal(tmp_path) as file:
        (stored,) = file.append(response(*KEYS[0], "x" * MAX_LINE_BYTES))
    with journal(tmp_path) as file:
        assert file.refused == {KEYS[0]: stored}
        assert file.refused[KEYS[0]].refused == "the response is longer than 16 MB"


def test_the_last_lines_can_be_cut_off(tmp_path: Path) -> None:
    with journal(tmp_path) as file:
        file.append(response(*KEYS[0]), refusal(*KEYS[1]), refusal(*KEYS[2]), response(*KEYS[3]))
        file.keep_first(4)
        assert len(file.places) == 4
        file.keep_first(2)
        assert (list(file.places), list(file.refused)) == (KEYS[:2], KEYS[1:2])
        file.append(response(*KEYS[5]))
    with journal(tmp_path) as file:
        assert list(file.places) == [*KEYS[:2], KEYS[5]]


def test_an_appended_line_is_in_the_file_and_with_sync_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    with journal(tmp_path) as file:
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
        file.append(response(*KEYS[0]))
        assert file.part.read_bytes().endswith(response(*KEYS[0]).model_dump_json().encode() + b"\n")
        assert synced == []
        file.append(response(*KEYS[1]), sync=True)
        assert synced == [file.part.stat().st_size]


@pytest.mark.parametrize("last", ["refused", "records", "manifest", "nothing"])
def test_killed_between_any_two_files_of_the_publishing_it_ends_the_same(
    tmp_path: Path, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`last`: what was written before the kill. The next run publishes from the journal."""
    with journal(tmp_path / "whole") as file:
        file.append(response(*KEYS[1]), refusal(*KEYS[0]))
        file.publish(run(responses=1))
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}

    killed_at = {"nothing": "a.refused.jsonl", "refused": "a.jsonl", "records": "a.manifest.json"}.get(last)
    replace = Path.replace

    def killed(self: Path, target: Path) -> Path:
        if target.name == killed_at:
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        if last == "manifest":
            patch.setattr(Journal, "remove", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with journal(tmp_path / "b") as file:
            file.append(response(*KEYS[1]), refusal(*KEYS[0]))
            with pytest.raises(KeyboardInterrupt):
                file.publish(run(responses=1))
    again = journal(tmp_path / "b")
    if again.finished():
        assert last == "manifest"
        again.remove()
    else:
        with again:
            assert list(again.places) == [KEYS[1], KEYS[0]]
            again.publish(run(responses=1))
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()} == whole


def test_published_without_its_manifest_the_file_is_the_journal_again(tmp_path: Path) -> None:
    """Where the file was renamed into place: the manifest of the journal still names the run."""
    with journal(tmp_path) as file:
        file.append(response(*KEYS[0]))
        file.publish(run())
    manifest_path(file.path).rename(manifest_path(file.part))
    with journal(tmp_path) as file:
        assert list(file.places) == KEYS[:1]
        file.publish(run())
    assert names(tmp_path) == ["a.jsonl", "a.manifest.json"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_published_file_becomes_a_journal_again(tmp_path: Path, kept: bool) -> None:
    with journal(tmp_path) as file:
        file.append(response(*KEYS[0]), refusal(*KEYS[1]))
        file.publish(run())
    file.reopen(refusals=kept)
    with journal(tmp_path) as file:
        assert not file.finished()
        assert (list(file.places), list(file.refused)) == (KEYS[: 1 + kept], KEYS[1 : 1 + kept])
        file.append(response(*KEYS[1]))
        file.publish(run())
    assert names(tmp_path) == ["a.jsonl", "a.manifest.json"]
    assert list(read_records(file.path, Response)) == [response(*KEYS[0]), response(*KEYS[1])]


def test_the_refusals_of_an_unfinished_journal_can_be_dropped(tmp_path: Path) -> None:
    with journal(tmp_path) as file:
        file.append(response(*KEYS[0]), refusal(*KEYS[1]))
    assert read_refusals(file.part) == [refusal(*KEYS[1])]
    file.reopen(refusals=False)
    assert read_refusals(file.part) == []
    with journal(tmp_path) as file:
        assert list(file.places) == KEYS[:1]
