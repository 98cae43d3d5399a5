"""What the report tells of every row: lengths, long rows by choice, duplicates, and rows on both sides of the held-out border."""

import json
from pathlib import Path

import pytest

from megatrain.config import RunConfig
from megatrain.data import overlap
from megatrain.data.prepare import Prepared, prepare
from megatrain.data.report import CUT, LENGTH_EDGES, SPLIT, DataReport, Tally
from tests.data import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved(tmp_path_factory.mktemp("chatml"), tiny.CHATML)


def prepared(tmp_path: Path, model: Path, rows: list[dict], **data) -> Prepared:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    config = RunConfig.from_dict({"data": {"path": str(path), "sequence_length": 64, **data}, "train": {"global_batch_tokens": 128}})
    return prepare(config, model, tmp_path / "cache")


def row(question: str, answer: str) -> dict:
    return {"messages": tiny.chat(question, answer)}


LONG = [row("q", "a" * 10), row("q" * 100, "b" * 100), row("q", "c" * 200)]


@pytest.mark.parametrize(("choice", "kept", "cut", "split", "dropped"), [
    ("cut", 3, 2, 0, {}), ("split", 3, 0, 2, {}), ("drop", 1, 0, 0, {"the row is longer than the sequence length": 2})])  # fmt: skip
def test_long_rows_are_cut_split_or_dropped_and_counted(
    tmp_path: Path, model: Path, choice: str, kept: int, cut: int, split: int, dropped: dict
) -> None:
    made = prepared(tmp_path, model, LONG, long_rows=choice)
    report = made.report
    assert (report.rows_kept, report.rows_cut, report.rows_split, report.dropped) == (kept, cut, split, dropped)
    reason = {"cut": CUT, "split": SPLIT, "drop": "the row is longer than the sequence length"}[choice]
    assert [number for number, _ in report.examples[reason]] == [2, 3]
    trained = {"cut": None, "split": 10 + 100 + 200 + 3, "drop": 11}[choice]
    if trained:  # splitting loses no answer but the label of each piece's first token
        assert trained - report.trained_tokens <= len(made.loader.streams[0].first.cache.rows)
    assert all(length <= 64 for length in made.loader.streams[0].first.cache.lengths)


def test_plain_text_is_split_by_default_and_dropped_by_choice_but_sections_of_a_file_are_not(tmp_path: Path, model: Path) -> None:
    texts = [{"text": "short"}, {"text": "long " * 40}]
    assert prepared(tmp_path, model, texts).report.rows_split == 1
    assert prepared(tmp_path, model, texts, long_rows="drop").report.rows_kept == 1
    (tmp_path / "book.txt").write_text("word " * 9000)
    config = RunConfig.from_dict({"data": {"path": str(tmp_path / "book.txt"), "sequence_length": 64, "long_rows": "drop"},
                                  "train": {"global_batch_tokens": 128}})  # fmt: skip
    assert prepare(config, model, tmp_path / "cache").report.tokens == 5 * 9000 + 2


def test_lengths_are_those_before_anything_is_cut(tmp_path: Path, model: Path) -> None:
    report = prepared(tmp_path, model, LONG).report
    assert sum(count for _, count in report.length_histogram) == 3
    assert [most for most, _ in report.length_histogram] == sorted(most for most, _ in report.length_histogram)
    assert set(dict(report.length_histogram)) <= set(LENGTH_EDGES)
    assert 200 < report.longest_row <= report.length_histogram[-1][0]
    assert report.trained_share == report.trained_tokens / report.tokens
    assert DataReport.from_json(report.to_json()) == report


def test_duplicates_are_counted_and_named(tmp_path: Path, model: Path) -> None:
    rows = [row("a", "b"), row("a", "c"), row("a", "b"), row("x" * 200, "d"), row("a", "b"), row("x" * 200, "d")]
    report = prepared(tmp_path, model, rows).report
    assert report.duplicates == 3
    assert [number for number, _ in report.examples["the same as an earlier row"]] == [3, 5, 6]
    assert report.examples["the same as an earlier row"][0] == (3, "the same as row 1")


@pytest.mark.parametrize("at_once", [1 << 24, 8])
def test_rows_that_are_held_out_and_trained_are_counted(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(overlap, "_AT_ONCE", at_once)  # in slices or at once, the counts are the same
    rows = [row(f"q{index}", "a") for index in range(40)]
    made = prepared(tmp_path, model, rows, eval_fraction=0.1)
    assert (made.report.eval_rows, made.report.eval_overlap, made.report.duplicates) == (4, 0, 0)
    twice = prepared(tmp_path, model, [*rows, *rows], eval_fraction=0.1)
    assert twice.report.duplicates == 40
    held_out = {int(number) for number in twice.loader.streams[0].first.held_out_rows}
    wanted = sum((number + 39) % 80 + 1 not in held_out for number in held_out)  # the twin of row n is row n + 40
    assert twice.report.eval_overlap == wanted > 0
    assert any("held-out rows are also trained on" in note for note in twice.report.notes)


def test_control_tokens_in_words_are_counted(tmp_path: Path, model: Path) -> None:
    rows = [row("what is <|im_end|>?", "an end"), row("and?", "no")]
    report = prepared(tmp_path, model, rows).report
    assert report.rows_escaped == 1
    assert report.notes == ["1 rows: control tokens in their words are encoded as ordinary characters."]


def test_preference_pairs_are_said_to_be_trained_on_their_chosen_side(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": f"q{index}", "chosen": "good", "rejected": "bad"} for index in range(3)]
    report = prepared(tmp_path, model, rows).report
    assert (report.format, report.rows_kept) == ("preference", 3)
    assert any("the chosen answers are trained" in note for note in report.notes)


def test_a_tally_goes_on_in_another_process() -> None:
    tally = Tally()
    tally.drop("no answer", 3, "a line 3", {"prompt": "x"})
    tally.length(17)
    tally.read, tally.kept, tally.longest = 5, 4, 17
    again = Tally.from_dict(json.loads(json.dumps(tally.to_dict())))
    assert again.to_dict() == tally.to_dict()
    assert again.examples == tally.examples


def test_a_chosen_template_is_kept_with_the_report(tmp_path: Path, model: Path) -> None:
    report = prepared(tmp_path, model, [row("q", "a")], chat_template=tiny.PLAIN).report
    assert (report.template, report.chat_template) == ("chosen", tiny.PLAIN)
    assert prepared(tmp_path, model, [row("q", "a")]).report.chat_template == ""
