"""Conversations in the shapes that chat templates take.

Many templates know no system role, or no tools. Rather than lose such rows, the same words are put where the template
has a place for them; every change is counted and shown.
"""

import json
from collections.abc import Iterator
from typing import Any

from megatrain.data.formats import Conversation

TOOLS_AS_TEXT = "tool calls and results were written as text, as the chat template has no place for them"
SYSTEM_IN_USER = "the system prompt was put before the first question, as the chat template has no system role"
CONTROL_TOKENS_ESCAPED = "control tokens in their words are encoded as ordinary characters"
TOOLS_UNSEEN = "the descriptions of tools are not trained on, as the chat template does not write them"
REASONING_UNSEEN = "the reasoning is not trained on, as the chat template does not write it"


def shapes(conversation: Conversation) -> Iterator[tuple[str, Conversation]]:
    """(what was changed, conversation), the unchanged one first with an empty text."""
    yield "", conversation
    plain = _tools_as_text(conversation)
    if plain is not None:
        yield TOOLS_AS_TEXT, plain
    for note, shape in (("", conversation), (TOOLS_AS_TEXT, plain)):
        folded = _system_in_user(shape) if shape else None
        if folded is not None:
            yield f"{note}; {SYSTEM_IN_USER}" if note else SYSTEM_IN_USER, folded


def _tools_as_text(conversation: Conversation) -> Conversation | None:
    if not any(message["role"] == "tool" or "tool_calls" in message for message in conversation.messages):
        return None
    messages = []
    for message in conversation.messages:
        message = dict(message)
        if message["role"] == "tool":
            message = {"role": "user", "content": message["content"]}
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.pop("tool_calls", [])]
        message["content"] = "\n".join([message["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]).strip("\n")
        messages.append(message)
    return Conversation(messages, conversation.trained, conversation.tools)


def _system_in_user(conversation: Conversation) -> Conversation | None:
    messages = conversation.messages
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return None
    first: dict[str, Any] = {**messages[1], "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
    return Conversation([first, *messages[2:]], conversation.trained[1:], conversation.tools)
