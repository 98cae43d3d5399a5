"""Rows -> examples: conversations, prompt and completion pairs, or plain text.

Six formats are known; `detect` finds the one that the first rows fit. A row that does not fit raises BadRow, whose
text is the reason that the report counts: what was expected, in words that do not depend on the row.
"""

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megatrain.data.files import Row
from megatrain.errors import DataError

FORMATS = ("alpaca", "sharegpt", "messages", "prompt_completion", "preference", "text")
EXAMPLES = {
    "alpaca": '{"instruction": "...", "input": "...", "output": "..."}',
    "sharegpt": '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}',
    "messages": '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
    "prompt_completion": '{"prompt": "...", "completion": "..."}',
    "preference": '{"prompt": "...", "chosen": "...", "rejected": "..."}',
    "text": '{"text": "..."}',
}

ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter", "customer"),
    "assistant": ("assistant", "gpt", "bot", "chatgpt", "chatbot", "model", "ai", "bing", "bard", "claude", "function_call", "tool_call"),
    "tool": ("tool", "observation", "function", "function_response", "tool_response", "ipython"),
}
_ROLE_OF = {name: role for role, names in ROLES.items() for name in names}

TURN_COLUMNS = ("messages", "conversations", "conversation", "dialog", "dialogue")
PAIR_COLUMNS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("instruction", "response"),
                ("query", "response"), ("problem", "solution"), ("input", "output"))  # fmt: skip
TEXT_COLUMNS = ("text", "content", "document", "code")
CALL_ROLES = ("function_call", "tool_call")  # the words of such a turn are a call written as JSON
PREFERENCE_NOTE = "The rows are preference pairs: the chosen answers are trained, the rejected ones are not used."
MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")


class BadRow(Exception):
    """A row that cannot be used. Its text is the reason, the same for all rows with this fault."""


@dataclass(frozen=True)
class Conversation:
    """Turns with the roles of chat templates. `trained[i]` says whether turn i, an assistant's, may be learnt."""

    messages: list[dict[str, Any]]
    trained: list[bool]
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Pair:
    """A prompt and the completion that continues it without a break. Where there is a chat template, it is a conversation."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """A document, or the part of one between `begins` and `ends`."""

    text: str
    begins: bool = True
    ends: bool = True


Example = Conversation | Pair | Text


def detect(rows: Iterable[dict[str, Any]], text_column: str | None = None) -> str:
    """The format that the columns of the first rows fit. DataError names the columns when there is none."""
    columns: dict[str, Any] = {}
    for values in rows:
        columns |= {name: value for name, value in values.items() if value is not None and name not in columns}
    if text_column:
        return "text"
    names = {name.lower() for name in columns}
    if {"chosen", "rejected"} <= names or {"chosen_messages", "rejected_messages"} <= names:
        return "preference"
    turns = next((found for found in (_turns(columns.get(name)) for name in TURN_COLUMNS) if isinstance(found, list)), None)
    if turns is not None:
        first = next((turn for turn in turns if isinstance(turn, dict)), {})
        return "sharegpt" if "from" in first or "value" in first else "messages"
    if {"instruction", "output"} <= names:
        return "alpaca"
    if any(set(pair) <= names for pair in PAIR_COLUMNS):
        return "prompt_completion"
    strings = [name for name, value in columns.items() if isinstance(value, str)]
    if names.intersection(TEXT_COLUMNS) or len(columns) == len(strings) == 1:
        return "text"
    known = "; ".join(f"{name}: {text}" for name, text in EXAMPLES.items())
    found = ", ".join(list(columns)[:12]) + (" …" if len(columns) > 12 else "")
    raise DataError(f"No known format has the columns {found or '(none)'}.",
                    f"Rename the columns, or set data.format and data.text_column. Known rows are {known}.")  # fmt: skip


def read_row(row: Row, format: str, text_column: str | None = None) -> Example:
    """The example that a row holds. BadRow says what was expected and is not there."""
    if row.problem:
        raise BadRow(row.problem)
    values = {name.lower(): value for name, value in row.values.items() if isinstance(name, str)}
    if format != "text":
        _refuse(values)
    if format == "text":
        return _read_text(values, row, text_column)
    readers = {"alpaca": _read_alpaca, "sharegpt": _read_turns, "messages": _read_turns, "prompt_completion": _read_pair,
               "preference": _read_preference}
    return readers[format](values)  # fmt: skip


def _refuse(values: dict[str, Any]) -> None:
    """Rows whose words alone would teach something else than was meant."""
    if values.get("label") is False:
        raise BadRow("the row is marked as a bad answer (its `label` is false)")
    media = next((name for name in MEDIA_COLUMNS if isinstance(values.get(name), (list, dict, bytes)) and values[name]), None)
    if media:
        raise BadRow(f"the row has something in `{media}`; only text can be trained")


def _read_text(values: dict[str, Any], row: Row, text_column: str | None) -> Text:
    if text_column:
        name = text_column.lower()
    else:
        name = next((column for column in TEXT_COLUMNS if column in values), next(iter(values), "text") if len(values) == 1 else "text")
    text = values.get(name)
    if not isinstance(text, str):
        raise BadRow(f"column `{name}` must hold text")
    if not text.strip() and row.begins and row.ends:
        raise BadRow(f"column `{name}` is empty")
    return Text(_clean(text), row.begins, row.ends)


def _read_alpaca(values: dict[str, Any]) -> Conversation:
    instruction, extra = _optional(values, "instruction"), _optional(values, "input")
    question = "\n\n".join(part for part in (instruction, extra) if part.strip())
    if not question:
        raise BadRow("column `instruction` is missing or empty")
    answer = _required(values, "output")
    turns = []
    if _optional(values, "system").strip():
        turns.append({"role": "system", "content": _optional(values, "system")})
    history = _parsed(values.get("history")) or []
    if not isinstance(history, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in history):
        raise BadRow("column `history` must be a list of [question, answer] pairs")
    for before, after in history:
        turns += [{"role": "user", "content": _clean(str(before))}, {"role": "assistant", "content": _clean(str(after))}]
    turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _conversation(turns)


def _read_pair(values: dict[str, Any]) -> Example:
    columns = next((pair for pair in PAIR_COLUMNS if set(pair) <= values.keys()), None)
    if columns is None:
        raise BadRow("a pair of columns like `prompt` and `completion` is missing")
    prompt, completion = (values[name] for name in columns)
    if isinstance(prompt, list) or isinstance(completion, list):
        before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        after = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
        return _read_turns({"messages": before + after, "tools": values.get("tools")})
    prompt, completion = _required(values, columns[0]), _required(values, columns[1])
    system = _optional(values, "system")
    if columns == ("prompt", "completion") and not system.strip():
        return Pair(prompt, completion)
    turns = [{"role": "system", "content": system}] if system.strip() else []
    return _conversation([*turns, {"role": "user", "content": prompt}, {"role": "assistant", "content": completion}])


def _read_turns(values: dict[str, Any]) -> Conversation:
    name = next((column for column in TURN_COLUMNS if values.get(column) is not None), "")
    turns = _turns(values.get(name))
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow("column `messages` or `conversations` must hold a list of turns")
    messages, trained = [], []
    system = _optional(values, "system") or _optional(values, "system_prompt")
    if system.strip() and not any(_role(turn) == "system" for turn in turns[:1]):
        messages.append({"role": "system", "content": system})
        trained.append(False)
    for turn in turns:
        message = _message(turn)
        messages.append(message)
        trained.append(message["role"] == "assistant" and _is_trained(turn))
    return _conversation(messages, trained, _tools(values.get("tools") or values.get("functions")))


def _read_preference(values: dict[str, Any]) -> Example:
    """The chosen answer behind what it answers. Earlier answers belong to both sides and are not trained."""
    whole = _turns(values.get("chosen_messages"))
    chosen = whole if whole is not None else _turns(values.get("chosen"))
    if isinstance(chosen, str) and chosen.lstrip().startswith("Human:"):  # the transcripts that Anthropic published
        parts = re.split(r"(?:^|\n\n)(Human|Assistant): ?", chosen.strip())[1:]
        roles = ["user" if name == "Human" else "assistant" for name in parts[::2]]
        chosen = [{"role": role, "content": text.strip()} for role, text in zip(roles, parts[1::2], strict=True)]
    if isinstance(chosen, dict):
        chosen = [chosen]
    if not isinstance(chosen, (str, list)) or not chosen:
        raise BadRow("column `chosen` must hold an answer, as text or as turns")
    before = next((found for found in (_turns(values.get(name)) for name in ("prompt", *TURN_COLUMNS)) if isinstance(found, list)), None)
    question = next((name for name in ("prompt", "question", "instruction", "query") if isinstance(values.get(name), str)), "")
    if isinstance(chosen, str) and before is None:
        prompt = "\n\n".join(part for part in (_required(values, question or "prompt"), _optional(values, "input")) if part.strip())
        return _read_pair({"prompt": prompt, "completion": chosen, "system": values.get("system")})
    turns = [{"role": "assistant", "content": chosen}] if isinstance(chosen, str) else chosen
    if before is None and question and isinstance(turns[0], dict) and _role(turns[0]) == "assistant":
        before = [{"role": "user", "content": _required(values, question)}]
    read = _read_turns({**values, "messages": [*(before or []), *turns]})
    last = max(index for index, message in enumerate(read.messages) if message["role"] == "assistant")
    return _conversation(read.messages, [index == last for index in range(len(read.messages))], read.tools)


def _conversation(messages: list[dict[str, Any]], trained: list[bool] | None = None, tools: Any = ()) -> Conversation:
    trained = trained or [message["role"] == "assistant" for message in messages]
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and not message["content"].strip() and not message.keys() & {"tool_calls", "reasoning_content"}:
            if not any(messages[later]["role"] == "assistant" for later in range(index + 1, len(messages))):
                raise BadRow("the answer is empty")
            trained[index] = False
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("there is no turn of the assistant")
    if not any(trained):
        raise BadRow("every turn of the assistant is marked as not to be trained")
    return Conversation(messages, trained, list(tools))


def _role(turn: dict[str, Any]) -> str:
    name = turn.get("role", turn.get("from"))
    if not isinstance(name, str):
        raise BadRow("every turn must have a `role` (or `from`)")
    role = _ROLE_OF.get(name.strip().lower())
    if role is None:
        raise BadRow(f"the role `{name.strip()[:40]}` is not known; known are {', '.join(_ROLE_OF)}")
    return role


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    """The turn as chat templates expect it: role, content as one string, and what some templates read besides."""
    message: dict[str, Any] = {"role": _role(turn)}
    content = turn.get("content", turn.get("value"))
    calls = _parsed(turn.get("tool_calls")) or []
    if str(turn.get("role", turn.get("from"))).strip().lower() in CALL_ROLES:
        content, calls = _called(content, calls)
    reasoning = turn.get("reasoning_content") or turn.get("thinking") or ""
    if isinstance(content, list):
        content, more_calls, more_reasoning = _parts(content)
        calls, reasoning = calls + more_calls, reasoning or more_reasoning
    if content is None and not calls:
        raise BadRow("every turn must have `content` (or `value`)")
    if content is not None and not isinstance(content, str):
        raise BadRow("the `content` of a turn must be text, or a list of text parts")
    message["content"] = _clean(content or "")
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    if reasoning:
        message["reasoning_content"] = _clean(str(reasoning))
    for name in ("name", "tool_call_id"):
        if isinstance(turn.get(name), str):
            message[name] = turn[name]
    return message


def _called(content: Any, calls: list[Any]) -> tuple[Any, list[Any]]:
    """Content and calls of a turn whose role says that it is a call: its text is the call, as JSON."""
    found = _parsed(content)
    found = [found] if isinstance(found, dict) else found
    is_call = isinstance(found, list) and found and all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in found)
    return ("", [*calls, *found]) if is_call else (content, calls)


def _parts(parts: list[Any]) -> tuple[str, list[Any], str]:
    """Text, tool calls and reasoning of a content that is a list of parts."""
    texts, calls, reasoning = [], [], []
    for part in parts:
        if isinstance(part, str):
            part = {"text": part}
        elif not isinstance(part, dict):
            raise BadRow("the `content` of a turn must be text, or a list of text parts")
        kind = part.get("type", "text")
        value = next((part[name] for name in ("text", "value", kind) if part.get(name) is not None), None)
        if kind == "text" and isinstance(value, str):
            texts.append(value)
        elif kind in ("reasoning", "thinking") and isinstance(value, str):
            reasoning.append(value)
        elif kind == "tool_call" and value is not None:
            calls.append(_parsed(value))
        else:
            raise BadRow(f"a turn has a part of type `{str(kind)[:40]}`; only text can be trained")
    return "".join(texts), calls, "".join(reasoning)


def _call(call: Any) -> dict[str, Any]:
    """A tool call as templates read it: {"type": "function", "function": {"name", "arguments"}}."""
    if not isinstance(call, dict):
        raise BadRow("a tool call must be an object with a name and arguments")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("a tool call must be an object with a name and arguments")
    arguments = _parsed(function.get("arguments"))
    found = {"type": "function", "function": {"name": function["name"], "arguments": {} if arguments is None else arguments}}
    return found | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def _tools(value: Any) -> list[dict[str, Any]]:
    """Descriptions of tools, as JSON text or as objects, in the form that templates expect."""
    tools = _parsed(value)
    if not tools:
        return []
    if isinstance(tools, dict):
        tools = [tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in map(_parsed, tools)):
        raise BadRow("column `tools` must be a list of tool descriptions")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in map(_parsed, tools)]


def _is_trained(turn: dict[str, Any]) -> bool:
    """False for a turn that its row excludes: weight 0, loss_weight 0, or train false."""
    return all(turn.get(name) is None or bool(turn[name]) for name in ("weight", "loss_weight", "train"))


def _parsed(value: Any) -> Any:
    """The value of a cell that holds JSON, or a Python literal as pandas writes it, as text; others as they are."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return value


def _turns(value: Any) -> Any:
    """The turns in a cell; a table of columns (as `datasets` stores a sequence of objects) becomes a list of turns."""
    value = _parsed(value)
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        return [dict(zip(value, cells, strict=False)) for cells in zip(*value.values(), strict=False)]
    return value


def _optional(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    if value is None:
        return ""
    if not isinstance(value, (str, int, float)):
        raise BadRow(f"column `{name}` must hold text")
    return _clean(value if isinstance(value, str) else str(value))


def _required(values: dict[str, Any], name: str) -> str:
    text = _optional(values, name)
    if not text.strip():
        raise BadRow(f"column `{name}` is missing or empty")
    return text


def _clean(text: str) -> str:
    """The text with line ends as the model knows them. BadRow for halves of characters, which no tokenizer takes."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRow("the text holds half a character (a lone surrogate)") from error
    return text.replace("\r\n", "\n")
