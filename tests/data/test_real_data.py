"""Real files, of which nothing is given but the path: each is compared with what its JSON says, read here in another way."""

import json
import zipfile
from pathlib import Path

import pytest

from megatrain.config import RunConfig
from megatrain.data.browse import Browser
from megatrain.data.prepare import prepare
from tests.data import real


def config(path: Path, **data) -> RunConfig:
    return RunConfig.from_dict({"data": {"path": str(path), "sequence_length": 2048, **data}, "train": {"global_batch_tokens": 4096}})


@pytest.fixture(scope="module")
def model() -> Path:
    return real.tokenizer_folder("qwen3")


def said(value: object) -> str:
    """The words of a turn: a string, or the text parts of a list."""
    if isinstance(value, list):
        return "".join(part["value"] for part in value if part["type"] == "text")
    return value if isinstance(value, str) else ""


def alpaca(row: dict) -> list[tuple[str, str]]:
    return [("user", "\n\n".join(filter(None, [row["instruction"], row["input"]]))), ("assistant", row["output"])]


def sharegpt(row: dict) -> list[tuple[str, str]]:
    roles = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool", "system": "system"}
    return [(roles[turn["from"]], "" if turn["from"] == "function_call" else turn["value"]) for turn in row["conversations"]]


def preference(row: dict) -> list[tuple[str, str]]:
    return sharegpt({"conversations": [*row["conversations"], row["chosen"]]})


def messages(row: dict) -> list[tuple[str, str]]:
    return [(turn["role"], said(turn["content"])) for turn in row.get("messages") or row["chosen_messages"]]


def text(row: dict) -> list[tuple[str, str]]:
    return [("text", row["text"])]


FILES = {
    "alpaca_en_demo.json": ("alpaca", alpaca, 999), "alpaca_zh_demo.json": ("alpaca", alpaca, 1000),
    "identity.json": ("alpaca", alpaca, 91), "c4_demo.jsonl": ("text", text, 300),
    "glaive_toolcall_en_demo.json": ("sharegpt", sharegpt, 300), "v1_sft_demo.jsonl": ("messages", messages, 500),
    "reason_tool_use_demo_50.jsonl": ("messages", messages, 50), "dpo_en_demo.json": ("preference", preference, 300),
    "v1_dpo_demo.jsonl": ("preference", messages, 10), "kto_en_demo.json": ("messages", messages, 300),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_rows_and_tokens_of_real_files(name: str, model: Path, tmp_path: Path) -> None:
    format, reference, count = FILES[name]
    path = real.data_folder() / name
    raw = json.loads(path.read_text("utf-8")) if path.suffix == ".json" else list(map(json.loads, path.read_text("utf-8").splitlines()))
    browser = Browser(config(path), model, tmp_path)
    assert browser.about()["sources"][0]["format"] == format
    rows = browser.rows(0, 2000)["rows"]
    assert len(rows) == len(raw) == count
    for row, values in zip(rows, raw, strict=True):
        if row["problem"]:
            assert "bad answer" in row["problem"]
            assert values["label"] is False
            continue
        wanted = [(role, words.replace("\r\n", "\n")) for role, words in reference(values)]
        assert [(turn["role"], turn["text"]) for turn in row["turns"]] == wanted
    for row in rows[:: max(1, count // 50)]:
        if not row["problem"]:
            assert_tokens(browser, row)


def assert_tokens(browser: Browser, row: dict) -> None:
    """The preview of a row: the last answer is trained, whole and with its end; no question is."""
    answer = browser.tokens(row["row"])
    assert answer["problem"] == ""
    shown = [token for document in answer["documents"] for token in document]
    assert answer["trained_tokens"] == sum(token["trained"] for token in shown) > 0
    trained = "".join(token["text"] for token in shown if token["trained"])
    last = row["turns"][-1]
    if last["role"] == "text":
        assert "".join(token["text"] for token in shown) == last["text"] + "<|im_end|>"
        return
    everything = "".join(token["text"] for token in shown)
    if not answer["change"]:
        assert last["calls"] or last["text"].strip() in trained
        assert trained.endswith("<|im_end|>")
        assert trained.count("<|im_end|>") == sum(turn["trained"] for turn in row["turns"])
    assert everything.count("<|im_start|>assistant") >= trained.count("<|im_end|>")


def test_tool_calls_of_real_conversations_are_written_as_the_template_writes_them(model: Path, tmp_path: Path) -> None:
    browser = Browser(config(real.data_folder() / "glaive_toolcall_en_demo.json"), model, tmp_path)
    row = next(row for row in browser.rows(0, 300)["rows"] if any(turn["calls"] for turn in row["turns"]))
    text = "".join(token["text"] for token in browser.tokens(row["row"])["documents"][0])
    call = next(turn["calls"][0]["function"] for turn in row["turns"] if turn["calls"])
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    assert f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {arguments}}}\n</tool_call>' in text
    assert "<tool_response>" in text


def test_wikipedia_is_one_document_in_sections(model: Path, tmp_path: Path) -> None:
    path = real.data_folder() / "wiki_demo.txt"
    made = prepare(config(path, eval_fraction=0.0), model, tmp_path)
    browser = Browser(config(path), model, tmp_path)
    rows = browser.rows(0, 1000)["rows"]
    assert "".join(row["turns"][0]["text"] for row in rows) == path.read_text("utf-8").replace("\r\n", "\n")
    assert (made.report.format, made.report.rows_kept, made.report.dropped) == ("text", len(rows), {})
    assert made.report.packing_efficiency > 0.97


def test_a_folder_and_a_zip_of_real_files_are_read_alike(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name in ("alpaca_en_demo.json", "identity.json"):
            rows = json.loads((real.data_folder() / name).read_text("utf-8"))
            (folder / name).write_text(json.dumps(rows[:90]), "utf-8")
            archive.write(folder / name, name)
    made = [prepare(config(path), model, tmp_path / "cache") for path in (folder, tmp_path / "all.zip")]
    assert made[0].loader.fingerprint == made[1].loader.fingerprint
    assert made[0].report.rows_kept == 90 + 90
    assert made[0].report.template == "tokenizer"


