"""Which format rows have, what is read from them, and why a row is refused."""

import json

import pytest

from megatrain.data.files import Row
from megatrain.data.formats import EXAMPLES, FORMATS, BadRow, Conversation, Pair, Text, detect, read_row
from megatrain.errors import DataError

USER, ASSISTANT = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
DETECTED = [
    ({"instruction": "Q", "input": "", "output": "A"}, "alpaca", [USER, ASSISTANT]),
    ({"instruction": "Q", "input": None, "output": 42}, "alpaca", [USER, {"role": "assistant", "content": "42"}]),
    ({"instruction": "Q", "input": "x", "output": "A", "system": "S", "history": [["q", "a"]]}, "alpaca",
     [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},
      {"role": "user", "content": "Q\n\nx"}, ASSISTANT]),
    ({"conversations": [{"from": "Human", "value": "Q"}, {"from": "gpt", "value": "A"}]}, "sharegpt", [USER, ASSISTANT]),
    ({"conversations": [{"role": "user", "content": "Q"}, {"role": "model", "content": "A"}]}, "messages", [USER, ASSISTANT]),
    ({"system": "S", "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}, "sharegpt",
     [{"role": "system", "content": "S"}, USER, ASSISTANT]),
    ({"messages": [USER, ASSISTANT]}, "messages", [USER, ASSISTANT]),
    ({"messages": json.dumps([USER, ASSISTANT])}, "messages", [USER, ASSISTANT]),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, {"role": "assistant", "content": ["A"]}]}, "messages",
     [USER, ASSISTANT]),
    ({"id": 3, "messages": [{"role": "user", "content": [{"type": "text", "value": "Q"}]}, ASSISTANT]}, "messages", [USER, ASSISTANT]),
    ({"messages": str([USER, ASSISTANT])}, "messages", [USER, ASSISTANT]),  # a list as pandas writes it into CSV
    ({"messages": {"role": ["user", "assistant"], "content": ["Q", "A"]}}, "messages", [USER, ASSISTANT]),
    ({"messages": [{**USER, "tool_calls": None, "name": None}, {**ASSISTANT, "weight": None}]}, "messages", [USER, ASSISTANT]),
    ({"question": "Q", "answer": "A"}, "prompt_completion", [USER, ASSISTANT]),
    ({"Instruction": "Q", "Response": "A", "category": "qa"}, "prompt_completion", [USER, ASSISTANT]),
    ({"prompt": "Q", "response": "A"}, "prompt_completion", [USER, ASSISTANT]),
    ({"prompt": [USER], "completion": [ASSISTANT]}, "prompt_completion", [USER, ASSISTANT]),
]  # fmt: skip


@pytest.mark.parametrize(("values", "format", "messages"), DETECTED)
def test_formats_are_found_by_their_columns_and_read(values: dict, format: str, messages: list[dict]) -> None:
    assert detect([values]) == format
    example = read_row(Row("", values), format)
    assert isinstance(example, Conversation)
    assert example.messages == messages
    assert example.trained == [message["role"] == "assistant" for message in messages]


def test_pairs_and_texts() -> None:
    assert detect([{"prompt": "a", "completion": "b"}]) == "prompt_completion"
    assert read_row(Row("", {"prompt": "a", "completion": "b"}), "prompt_completion") == Pair("a", "b")
    for values in ({"text": "a\r\nb", "meta": {}}, {"content": "a\r\nb", "id": 1}, {"anything": "a\r\nb"}):
        assert detect([values]) == "text"
        assert read_row(Row("", values), "text") == Text("a\nb")
    assert detect([{"body": "a", "title": "b"}], text_column="body") == "text"
    assert read_row(Row("", {"Body": "a", "title": "b"}), "text", "Body") == Text("a")


@pytest.mark.parametrize("name", FORMATS)
def test_the_examples_that_people_are_shown_are_of_their_format(name: str) -> None:
    values = json.loads(EXAMPLES[name])
    assert detect([values]) == name
    read_row(Row("", values), name)


def test_detection_looks_at_more_than_the_first_row() -> None:
    assert detect([{"instruction": "Q", "output": None}, {"instruction": "Q", "output": "A"}]) == "alpaca"


@pytest.mark.parametrize(("values", "words"), [
    ({"title": "a", "body": "b", "n": 1}, "columns title, body, n"),
    ({}, "no columns|\\(none\\)"),
])  # fmt: skip
def test_columns_that_fit_nothing_are_named_with_what_would_fit(values: dict, words: str) -> None:
    with pytest.raises(DataError, match=words):
        detect([values])


def test_tool_calls_reasoning_and_weights_are_understood() -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    turns = [
        {"role": "user", "content": "Q", "loss_weight": 0.0},
        {"role": "assistant", "weight": 0,
         "content": [{"type": "reasoning", "value": "R"}, {"type": "tool_call", "value": json.dumps(call)}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "A", "loss_weight": 1.0},
    ]  # fmt: skip
    example = read_row(Row("", {"messages": turns, "tools": json.dumps([{"name": "f", "parameters": {}}])}), "messages")
    assert isinstance(example, Conversation)
    assert example.trained == [False, False, False, True]
    calls = [{"type": "function", "function": call}]
    assert example.messages[1] == {"role": "assistant", "content": "", "reasoning_content": "R", "tool_calls": calls}
    assert example.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_sharegpt_tool_roles() -> None:
    turns = [("system", "S"), ("human", "Q"), ("function_call", "{}"), ("observation", "2"), ("gpt", "A")]
    example = read_row(Row("", {"conversations": [{"from": role, "value": text} for role, text in turns]}), "sharegpt")
    assert isinstance(example, Conversation)
    assert [message["role"] for message in example.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert example.trained == [False, False, True, False, True]


REFUSED = [
    ("alpaca", {"instruction": " ", "output": "A"}, "column `instruction` is missing or empty"),
    ("alpaca", {"instruction": "Q"}, "column `output` is missing or empty"),
    ("alpaca", {"instruction": "Q", "output": ["A"]}, "column `output` must hold text"),
    ("alpaca", {"instruction": "Q", "output": "A", "history": "x"}, "column `history` must be a list of"),
    ("messages", {"messages": "hello"}, "must hold a list of turns"),
    ("messages", {"other": 1}, "must hold a list of turns"),
    ("messages", {"messages": []}, "there is no turn of the assistant"),
    ("messages", {"messages": [USER]}, "there is no turn of the assistant"),
    ("messages", {"messages": [USER, {"role": "assistant", "content": " "}]}, "the answer is empty"),
    ("messages", {"messages": [USER, {"role": "assistant"}]}, "every turn must have `content`"),
    ("messages", {"messages": [USER, {"content": "A"}]}, "every turn must have a `role`"),
    ("messages", {"messages": [USER, {"role": "wizard", "content": "A"}]}, "the role `wizard` is not known; known are system,"),
    ("messages", {"messages": [USER, {**ASSISTANT, "weight": 0}]}, "marked as not to be trained"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, ASSISTANT]}, "a part of type `image`"),
    ("messages", {"messages": [USER, {"role": "assistant", "content": {"a": 1}}]}, "must be text, or a list of text parts"),
    ("messages", {"messages": [USER, ASSISTANT], "tools": "[1]"}, "column `tools` must be a list"),
    ("messages", {"messages": [USER, ASSISTANT], "label": False}, "marked as a bad answer"),
    ("sharegpt", {"messages": [USER, ASSISTANT], "images": ["x.png"]}, "something in `images`; only text can be trained"),
    ("messages", {"messages": "[" * 100_000}, "must hold a list of turns"),
    ("prompt_completion", {"prompt": "a"}, "a pair of columns like `prompt` and `completion` is missing"),
    ("prompt_completion", {"prompt": "", "completion": "b"}, "column `prompt` is missing or empty"),
    ("text", {"text": " \n"}, "column `text` is empty"),
    ("text", {"text": None}, "column `text` must hold text"),
    ("text", {"text": "half \ud83d"}, "half a character"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "values", "reason"), REFUSED)
def test_a_row_is_refused_with_what_was_expected(format: str, values: dict, reason: str) -> None:
    with pytest.raises(BadRow) as refusal:
        read_row(Row("", values), format)
    assert reason in str(refusal.value)


Q, CALL = {"role": "user", "content": "Q"}, {"name": "f", "arguments": {"x": 1}}
PREFERENCES = [
    {"prompt": "Q", "chosen": "A", "rejected": "B"},
    {"question": "Q", "chosen": "A", "rejected": "B"},
    {"instruction": "Q", "input": "", "chosen": "A", "rejected": "B"},
    {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [{"role": "assistant", "content": "B"}]},
    {"prompt": "Q", "chosen": [USER, ASSISTANT], "rejected": [USER, {"role": "assistant", "content": "B"}]},
    {"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "A"},
     "rejected": {"from": "gpt", "value": "B"}},
    {"chosen_messages": [USER, ASSISTANT], "rejected_messages": [USER, ASSISTANT]},
    {"chosen": "\n\nHuman: Q\n\nAssistant: A", "rejected": "\n\nHuman: Q\n\nAssistant: B"},
]  # fmt: skip


@pytest.mark.parametrize("values", PREFERENCES, ids=lambda values: ",".join(values))
def test_of_a_preference_pair_the_chosen_side_is_read(values: dict) -> None:
    assert detect([values]) == "preference"
    assert spoken(read_row(Row("", values), "preference")) == [USER, ASSISTANT]


def spoken(example: object) -> list[dict]:
    if isinstance(example, Pair):
        return [{"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.completion}]
    assert isinstance(example, Conversation)
    return example.messages


def test_only_answers_to_the_chosen_side_of_a_pair_are_trained() -> None:
    turns = [USER, ASSISTANT, USER]
    example = read_row(Row("", {"prompt": turns, "chosen": [ASSISTANT], "rejected": "B"}), "preference")
    assert isinstance(example, Conversation)
    assert example.trained == [False, False, False, True]


def test_a_preference_pair_without_its_chosen_side_is_refused() -> None:
    for values in ({"prompt": "Q", "rejected": "B"}, {"prompt": "Q", "chosen": "", "rejected": "B"}, {"prompt": "Q", "chosen": 3}):
        with pytest.raises(BadRow):
            read_row(Row("", values), "preference")


@pytest.mark.parametrize("text", [json.dumps(CALL), json.dumps([CALL]), json.dumps({**CALL, "arguments": '{"x": 1}'})])
def test_a_function_call_of_sharegpt_is_a_tool_call(text: str) -> None:
    turns = [{"from": "human", "value": "Q"}, {"from": "function_call", "value": text}, {"from": "observation", "value": "2"}]
    example = read_row(Row("", {"conversations": turns}), "sharegpt")
    assert isinstance(example, Conversation)
    assert example.messages[1] == {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
