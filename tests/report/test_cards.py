"""Cards for the hub: the metadata that `huggingface_hub` reads back, and predictions that `datasets` loads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Json, Value, load_dataset
from huggingface_hub import DatasetCard, ModelCard
from markdown_it import MarkdownIt
from pages import ROOT, blocks
from report_world import World, measured

import catto
from catto.io.record_files import write_records
from catto.metrics.errors import brier
from catto.records import Prediction
from catto.report.build import make_experiment_cards, write_cards
from catto.report.figures import make_pictures

ROWS = 40


def prediction(n: int, **other: Any) -> Prediction:
    """Row n of 40: the confidence rises with n, every third answer is wrong."""
    fields = {
        "question": f"q{n}",
        "task": "commonsense_qa",
        "split": "validation",
        "gold": "A",
        "sample": 0,
        "text": "<answer>A</answer>" * 20,
        "label": "B" if n % 3 == 0 else "A",
        "source": "free",
        "confidence": (n + 0.5) / ROWS,
        "label_logprobs": {"A": -0.25, "B": -1.5},
        "temperature": 0.0,
        "seed": 0,
        "engine": "transformers",
        "model": "somewhere/tiny-model",
    }
    return Prediction.model_validate(fields | other)


def written(folder: Path, predictions: list[Prediction]) -> Path:
    path = folder / "predictions.jsonl"
    write_records(path, predictions)
    write_cards(path)
    return path


def loaded(folder: Path, source: str, **options: Any) -> Any:
    return load_dataset(source, cache_dir=str(folder / "cache"), split=options.pop("split", "validation"), **options)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_model_card_gives_the_results_as_model_index(tmp_path: Path) -> None:
    predictions = [prediction(n) for n in range(ROWS)]
    written(tmp_path, predictions)
    card = ModelCard.load(tmp_path / "model_card.md")
    assert card.data.model_name == "tiny-model"
    confidence = [one.confidence for one in predictions]
    correct = [one.label == one.gold for one in predictions]
    expected = {"accuracy": 26 / 40, "ece": catto.ece(confidence, correct), "brier": brier(confidence, correct)}
    results = {one.metric_type: one for one in card.data.eval_results}
    assert {name: one.metric_value for name, one in results.items()} == pytest.approx(expected)
    for one in results.values():
        assert (one.task_type, one.dataset_type, one.dataset_name) == (
            "multiple-choice",
            "tau/commonsense_qa",
            "commonsense_qa",
        )
        assert (one.dataset_split, one.dataset_args) == ("validation", {"answers": ROWS})
    assert "| Accuracy | 65.0 |" in card.text
    assert re.search(r"\| ECE \| [\d.]+ \| [^|]* \| \d+\.\d to \d+\.\d \|", card.text)
    assert (tmp_path / re.findall(r"!\[.*\]\((.*)\)", card.text)[0]).read_bytes().startswith(b"\x89PNG")


def test_a_card_begins_with_the_warning_that_answers_were_forced(tmp_path: Path) -> None:
    written(tmp_path, [prediction(n, source="fallback") for n in range(ROWS)])
    text = ModelCard.load(tmp_path / "model_card.md").text
    assert "40 of 40 answers had to be forced" in text.split("| Metric |")[0]


def test_datasets_reads_predictions_of_one_task_without_any_card(tmp_path: Path) -> None:
    path = written(tmp_path, [prediction(n) for n in range(ROWS)])
    rows = loaded(tmp_path, "json", data_files=str(path), split="train")
    assert list(rows) == rows_of(path)


def test_the_dataset_card_types_columns_that_are_null_or_differ_between_rows(tmp_path: Path) -> None:
    """Rows without log-probabilities, then other labels: read in parts, the first part decides on the columns."""
    bare = {"label_logprobs": None, "label": None, "mean_logprob": None, "tokens": None}
    predictions = [prediction(n, **bare) for n in range(ROWS // 2)]
    predictions += [prediction(n, label_logprobs={"no": -0.5, "yes": -1.0}, tokens=7) for n in range(ROWS // 2, ROWS)]
    path = written(tmp_path, predictions)
    with pytest.raises(Exception, match="generating the dataset"):
        loaded(tmp_path, "json", data_files=str(path), split="train", chunksize=2000)
    rows = loaded(tmp_path, str(tmp_path), chunksize=2000)
    assert list(rows) == rows_of(path)
    assert rows.features["confidence_raw"] == Value("float64")
    assert rows.features["label_logprobs"] == Json()
    without_labels = ("answer", "correct", "confidence_kind", "confidences")
    assert list(rows.features) == [name for name in Prediction.model_fields if name not in without_labels]
    card = DatasetCard.load(tmp_path / "README.md")
    assert card.data.pretty_name == "Predictions of tiny-model on commonsense_qa"
    assert "reliability.png" in card.text


HOSTILE = {
    "tag": "<img src=x onerror=alert(1)>",
    "link": "[free](javascript:alert(1))",
    "picture": "![x](https:x.example)",
    "bare link": "www.x.example and @someone",
    "terminal": "red\x1b[31m\x9b2J\x07\u202etxt",
    "header": "x\n---\nlicense: mit\n---\n# x",
    "table": "a | b\n|---|---|\n| c | d |",
    "mathematics": "$$\\frac{1}{$$",
    "code": "``` `x` ```",
    "long": "m" * 5000,
    "empty": "",
}


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("field", ["model", "task"])
def test_names_that_a_server_or_a_file_chose_are_only_text_in_the_cards(tmp_path: Path, field: str, name: str) -> None:
    """Rendered by a parser that allows HTML and finds bare links, the cards have no tag beyond their own."""
    written(tmp_path, [prediction(n, **{field: name}) for n in range(ROWS)])
    own = {"h1", "h2", "p", "img", "table", "thead", "tbody", "tr", "th", "td", "code"}
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    for kind, file in ((ModelCard, "model_card.md"), (DatasetCard, "README.md")):
        text = (tmp_path / file).read_text(encoding="utf-8")
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
        card = kind.load(tmp_path / file)
        assert "license" not in card.data.to_dict()
        assert len(card.text) < 2500
        page = parser.render(card.text)
        assert set(re.findall(r"<(\w+)", page)) <= own
        assert re.findall(r"<img src=\"?([^\"\s>]*)", page) == ["reliability.png"]
        assert page.count("<h1>") == 1
        assert page.count("<table>") == (kind is ModelCard)
        # Bare links and mentions are found by the hub's renderer in the text itself.
        assert not re.search(r"https?:|www\.|@", card.text)


def test_a_plain_name_is_shown_as_it_is(tmp_path: Path) -> None:
    written(tmp_path, [prediction(n, model="Qwen/Qwen3-1.7B_chat") for n in range(ROWS)])
    page = MarkdownIt().render(ModelCard.load(tmp_path / "model_card.md").text)
    assert "<h1>Qwen3-1.7B_chat</h1>" in page


def test_a_readme_of_other_contents_is_kept(tmp_path: Path) -> None:
    """`--out` may be the folder of the model, whose card has that name."""
    (tmp_path / "README.md").write_text("# my-model\n")
    path = written(tmp_path, [prediction(n) for n in range(ROWS)])
    assert (tmp_path / "README.md").read_text() == "# my-model\n"
    (tmp_path / "README.md").unlink()
    assert write_cards(path) == write_cards(path) == ["reliability.png", "model_card.md", "README.md"]


def test_an_experiment_has_a_card_for_each_model_and_task_of_its_first_seed() -> None:
    world = measured(World(rows=20, seeds=(1, 2), methods=("sft", "sft+ts", "dpo"), tasks=("snli",), resamples=20))
    cards = {name: ModelCard(text) for name, text in make_experiment_cards(world.numbers)}
    assert set(cards) == {
        f"{place}-{model}" for place in ("snli", "snli-from-mmlu") for model in ("sft", "dpo-paper", "dpo-matched")
    }
    (cell,) = [one for one in world.numbers.cells if (one.method, one.trained_on, one.seed) == ("sft", "mmlu", 1)]
    results = cards["snli-from-mmlu-sft"].data.eval_results
    assert {(one.dataset_name, one.dataset_type) for one in results} == {("snli", "stanfordnlp/snli")}
    assert {one.metric_type: one.metric_value for one in results} == pytest.approx(
        {name: cell.metrics[name].value for name in ("accuracy", "ece", "brier")}
    )
    assert {one.dataset_args["answers"] for one in results} == {20}
    drawn = {f"../figures/{picture.name}.svg" for picture in make_pictures(world.results, world.numbers, world.cells)}
    assert {picture for card in cards.values() for picture in re.findall(r"!\[.*\]\((.*)\)", card.text)} <= drawn
    assert all("![Reliability diagram" in card.text for card in cards.values())


def test_the_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    written(tmp_path / "eval", [prediction(n, split="test") for n in range(ROWS)])
    before = ModelCard("---\nlicense: apache-2.0\nbase_model: my-sft-model\n---\n\n# my-dpo-model\n")
    before.save("my-dpo-model/README.md")
    code = [block.text for block in blocks((ROOT / "docs" / "publishing.md").read_text()) if block.language == "python"]
    assert len(code) == 2
    for text in code:
        exec(compile(text, "publishing.md", "exec"), {})
    merged = ModelCard.load("my-dpo-model/README.md")
    assert (merged.data.license, merged.data.base_model) == ("apache-2.0", "my-sft-model")
    assert {one.metric_type for one in merged.data.eval_results} == {"accuracy", "ece", "brier"}
    assert merged.text.index("# my-dpo-model") < merged.text.index("## Confidence on commonsense\\_qa")
    assert Path("my-dpo-model/reliability.png").exists()
