"""What the Data page is told: rows, tokens, search and figures, through the process that it really asks."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain.config import RunConfig
from megatrain.data import recipes
from megatrain.data.browse import Browser
from megatrain.data.preview import Preview
from megatrain.data.recipes import Recipe
from megatrain.errors import DataError
from tests.data import tiny

ROWS = [{"messages": tiny.chat(f"Question {n}?", f"Answer {n} 😀", system="Be")} for n in range(40)]


def config(path: Path | str, **data) -> RunConfig:
    return RunConfig.from_dict({"data": {"path": str(path), "sequence_length": 128, **data}, "train": {"global_batch_tokens": 256}})


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    tiny.saved(folder / "model", tiny.CHATML)
    bad = {"messages": [{"role": "wizard", "content": "x"}]}
    (folder / "a.jsonl").write_text("\n".join(json.dumps(row) for row in [*ROWS, bad, ROWS[0], {"messages": tiny.chat("q" * 300, "a")}]))
    (folder / "b.csv").write_text("text\nplain words\n")
    recipes.save("mixed", Recipe([{"path": str(folder / "a.jsonl")}, {"path": str(folder / "b.csv"), "weight": 2}]), folder)
    return folder


@pytest.fixture(scope="module")
def preview(workspace: Path) -> Iterator[Preview]:
    with Preview(config("mixed"), workspace / "model", workspace) as made:
        yield made


def test_what_the_data_is(preview: Preview) -> None:
    assert [(found["name"], found["format"], found["weight"], found["columns"]) for found in preview.about["sources"]] == [
        ("a.jsonl", "messages", 1.0, ["messages"]), ("b.csv", "text", 2.0, ["text"])]  # fmt: skip
    assert (preview.about["template"], preview.about["has_tokenizer"]) == ("tokenizer", True)


def test_rows_are_conversations_or_have_a_problem(preview: Preview) -> None:
    page = preview.rows(0, 2)
    assert page["more"]
    assert [(turn["role"], turn["text"], turn["trained"]) for turn in page["rows"][1]["turns"]] == [
        ("system", "Be", False), ("user", "Question 1?", False), ("assistant", "Answer 1 😀", True)]  # fmt: skip
    assert page["rows"][1]["values"] == ROWS[1]
    last = preview.rows(40, 20)
    assert not last["more"]
    assert [row["row"] for row in last["rows"]] == [41, 42, 43, 44]
    assert "the role `wizard` is not known" in last["rows"][0]["problem"]
    assert last["rows"][0]["place"] == "a.jsonl line 41"
    assert (last["rows"][3]["source"], last["rows"][3]["turns"][0]["text"]) == ("b.csv", "plain words")
    assert preview.rows(0, 1)["rows"][0]["row"] == 1


def test_tokens_as_the_model_sees_them(preview: Preview) -> None:
    answer = preview.tokens(1)
    (document,) = answer["documents"]
    assert "".join(token["text"] for token in document).startswith("<|im_start|>system\nBe<|im_end|>\n")
    assert "".join(token["text"] for token in document if token["trained"]) == "Answer 0 😀<|im_end|>"
    assert [token["text"] for token in document if token["special"]] == ["<|im_start|>", "<|im_end|>"] * 3
    assert len(document) == answer["tokens"] == answer["length"]
    assert answer["trained_tokens"] == sum(token["trained"] for token in document)
    cut = preview.tokens(43)
    assert (cut["change"], cut["tokens"]) == ("longer than the sequence length: cut", 128)
    assert cut["length"] > 300
    assert "wizard" in preview.tokens(41)["problem"]
    with pytest.raises(DataError, match="There is no row 99"):
        preview.tokens(99)


def test_search(preview: Preview) -> None:
    assert [row["row"] for row in preview.search("question 3")["rows"]] == [4, *range(31, 41)]
    first = preview.search("question", limit=3)
    assert (len(first["rows"]), first["next"]) == (3, 4)
    assert preview.search("question", start=4, limit=1)["rows"][0]["row"] == 4
    assert preview.search("nothing like it") == {"rows": [], "next": 0}


def test_figures(preview: Preview, workspace: Path) -> None:
    progress: list[tuple[int, int]] = []
    report = preview.statistics(lambda done, total: progress.append((done, total)))
    assert (report["rows_read"], report["rows_kept"], report["rows_cut"], report["duplicates"]) == (44, 43, 1, 1)
    assert sum(count for _, count in report["length_histogram"]) == 43
    assert 0 < report["trained_share"] < 1
    assert report["steps_per_epoch"] > 0
    assert report["examples"]["the same as an earlier row"] == [[42, "the same as row 1"]]
    assert progress[-1] == (44, 44)
    assert list((workspace / "cache" / "data").iterdir())


def test_figures_can_be_cancelled_and_rows_asked_afterwards(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text("\n".join(json.dumps({"text": "word " * 400}) for _ in range(20_000)))
    with Preview(config(tmp_path / "long.jsonl"), workspace / "model", tmp_path) as made:
        started = threading.Event()
        with pytest.raises(DataError, match="was stopped"):
            made.statistics(lambda done, total: started.set(), started.is_set)
        assert made.rows(0, 1)["rows"][0]["row"] == 1


def test_errors_come_with_their_hint_and_leave_no_process(workspace: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        Preview(config(tmp_path / "missing.jsonl"), workspace / "model", workspace)
    assert "There is no file" in error.value.message
    assert error.value.hint
    with Preview(config(workspace / "b.csv"), None, workspace) as made:
        assert made.rows(0, 5)["rows"][0]["turns"][0]["role"] == "text"
        with pytest.raises(DataError, match="no tokenizer"):
            made.tokens(1)
        made._process.kill()
        with pytest.raises(DataError, match="has ended"):
            made.rows(0, 1)


def test_a_page_goes_back_and_forth_in_many_rows(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.data.browse.KEPT_ROWS", 10)
    (tmp_path / "many.jsonl").write_text("\n".join(json.dumps({"text": f"row {n}"}) for n in range(1, 101)))
    browser = Browser(config(tmp_path / "many.jsonl"), None, tmp_path)
    for start in (0, 90, 40, 95, 3):
        rows = browser.rows(start, 5)["rows"]
        assert [row["turns"][0]["text"] for row in rows] == [f"row {n}" for n in range(start + 1, start + 6)]
