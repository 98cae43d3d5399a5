"""Where the answers lie in a rendered conversation. Pure functions on text, ids and positions."""

import os.path
from collections.abc import Callable, Iterable
from typing import Any

from megatrain.data.formats import BadRow, Conversation

Span = tuple[int, int]


def finish_span(span: Span, ids: list[int], own_ends: set[int], next_ends: set[int], is_blank: Callable[[int], bool]) -> Span:
    """The span of one answer, made to end with its end token.

    What follows an end token (of `own_ends`) inside the span, a line feed in most templates, is taken off. Where the
    span has none, one of `next_ends` that stands just behind it is taken in.
    """
    first, last = span
    end = last
    while end > first and is_blank(ids[end - 1]):
        end -= 1
    if end > first and ids[end - 1] in own_ends:
        return first, end
    end = last
    while end < len(ids) and is_blank(ids[end]):
        end += 1
    if end < len(ids) and ids[end] in next_ends:
        return first, end + 1
    return span


def find_ids(ids: list[int], wanted: list[int], start: int) -> tuple[int, int]:
    """(where `wanted` stands in `ids` from `start` on, the index behind it); -1 twice when it does not."""
    try:
        while True:
            start = ids.index(wanted[0], start)
            if ids[start : start + len(wanted)] == wanted:
                return start, start + len(wanted)
            start += 1
    except ValueError:
        return -1, -1


def has_every_turn(conversation: Conversation, text: str) -> bool:
    """Whether the words of every turn stand in the rendered text. Templates may drop reasoning, never words."""
    for message in conversation.messages:
        if visible_words(message) not in text:
            return False
        if any(call["function"]["name"] not in text for call in message.get("tool_calls", [])):
            return False
    return True


def visible_words(message: dict[str, Any]) -> str:
    """What every template writes of a turn: its words without the reasoning in them."""
    content: str = message["content"]
    if message["role"] == "assistant":
        content = content.rpartition("</think>")[2]
    return content.strip()


def char_spans(conversation: Conversation, text: str, rendered: Callable[[int, bool], str | None], end_tokens: Iterable[str]) -> list[Span]:
    """Character positions of the trained answers in `text`, each with its end token.

    `rendered(count, header)` is the text of the first `count` messages, with the header of an answer behind them when
    `header` is true; None where the template refuses. BadRow when an answer cannot be followed through the template.
    """
    spans: list[Span] = []
    end_tokens = list(end_tokens)
    turn = 0  # where the turn begins that is looked at
    for index, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        before = rendered(index, False) if index else None
        if before is not None and text.startswith(before):
            turn = max(turn, len(before))
        start = _start(message, text, rendered(index, True) if index else None, turn)
        is_last = index + 1 == len(conversation.messages)
        stop = len(text) if is_last else _stop(message, text, rendered(index + 1, False), start, end_tokens)
        if conversation.trained[index]:
            spans.append((start, stop))
        turn = stop
    return spans


def _start(message: dict[str, Any], text: str, header: str | None, turn: int) -> int:
    if header is not None and text.startswith(header) and len(header) >= turn:
        return len(header)
    content = message["content"].strip()
    if content and not message.keys() & {"tool_calls", "reasoning_content"}:
        for words in (content, visible_words(message)):
            found = text.find(words, turn)
            if words and found >= 0:
                return found
    if header is not None:  # the header that differs only in what it opens, such as a thinking block
        common = len(os.path.commonprefix([header, text]))
        line = text.rfind("\n", 0, common) + 1
        if max(line, common) > turn:
            return line if line > turn else common
    raise BadRow("the chat template changes an answer so that it cannot be found again")


def _stop(message: dict[str, Any], text: str, ended: str | None, start: int, end_tokens: list[str]) -> int:
    if ended is not None and text.startswith(ended) and len(ended) > start:
        return len(ended)
    if ended is not None:
        tail = ended.rstrip()
        end_token = next((token for token in end_tokens if token and tail.endswith(token)), None)
        found = text.find(end_token, start) if end_token else -1
        if end_token and found >= 0:
            return found + len(end_token)
    words = visible_words(message)
    found = text.find(words, start)
    if words and found >= 0:
        return found + len(words)
    raise BadRow("the chat template changes an answer so that its end cannot be found again")
