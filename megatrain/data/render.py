"""Messages -> text, through a chat template. A template is a program that comes with the model: it runs in a sandbox."""

from typing import Any

from megatrain.data.formats import BadRow, Conversation
from megatrain.data.templates import chosen_template

PLAIN_KEYS = {"role", "content", "name", "tool_call_id"}
# Some templates print today's date by calling strftime_now; what a step holds must not depend on the day.
_DATE_PARTS = {"%Y": "2025", "%y": "25", "%m": "01", "%B": "January", "%b": "Jan", "%d": "01", "%A": "Wednesday", "%a": "Wed",
               "%H": "12", "%M": "00", "%S": "00"}  # fmt: skip
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f".replace('{mark}', '{value}')" for mark, value in _DATE_PARTS.items())
    + " }}{%- endmacro -%}"
)


class ChatTemplate:
    """One tokenizer's template, or the one chosen in its place.

    kind: tokenizer | fallback | chosen. text: the template, None for the tokenizer's own. header: what has to be added for a
    template that knows no generation prompt. trailer: a header that it writes at the end of every conversation, taken off.
    """

    def __init__(self, tokenizer: Any, choice: str | None) -> None:
        self.kind, self.text = chosen_template(choice, tokenizer)
        self.header = self.trailer = ""
        self._tokenizer, self._special = tokenizer, tokenizer.special_tokens_map

    def learn_trailer(self, whole: str, added: list[str]) -> None:
        """From a conversation with the answer `zzz`: what stands behind its end token, if it is the header that stands before it, too."""
        before, _, behind = whole.rpartition("zzz")
        start, length = min(((behind.find(token), len(token)) for token in added if token in behind), default=(0, 0))
        rest = behind[start + length :].lstrip()
        self.trailer = rest if rest and before.endswith(rest) else ""

    def part(self, conversation: Conversation, count: int, add_generation_prompt: bool) -> str | None:
        """The text of the first messages; None where the template refuses a conversation that stops there."""
        try:
            return self.text_of(conversation, conversation.messages[:count], add_generation_prompt) if count else None
        except BadRow:
            return None

    def text_of(self, conversation: Conversation, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """The text of some messages, with the header of an answer behind them only if it is asked for."""
        text = self._apply(conversation, messages, add_generation_prompt)
        return text + self.header if add_generation_prompt else text.removesuffix(self.trailer)

    def _apply(self, conversation: Conversation, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """The template's text of some of the messages. BadRow where it refuses them."""
        import jinja2

        try:
            return self._rendered(conversation, messages, add_generation_prompt)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            # A template is a program that comes with the model, and any of these is its way to refuse a row.
            text = " ".join(str(error).split())[:160]
            raise BadRow(f"the chat template refuses the conversation: {text}") from error

    def _rendered(self, conversation: Conversation, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """Plain messages go to the compiled template itself: half the time of the way through the tokenizer, which copies them."""
        from transformers.utils import chat_template_utils

        template, tools = self.template_for(conversation), conversation.tools or None
        if tools or not all(message.keys() <= PLAIN_KEYS for message in messages):
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt)  # fmt: skip
        compiled = chat_template_utils._compile_jinja_template(template)
        return compiled.render(messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **self._special)

    def template_for(self, conversation: Conversation) -> str:
        template: str = self.text or self._tokenizer.get_chat_template(None, conversation.tools or None)
        return _FIXED_DATE + template if "strftime_now" in template else template
