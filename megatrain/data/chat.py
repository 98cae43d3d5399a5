"""Examples -> token ids and their loss mask, through the tokenizer's own chat template.

A token is trained when the model has to write it: everything that an assistant says, and the end token of each of its
turns, without which a model never stops. Nothing of a prompt, and nothing that the template adds behind an end token.

Where the answers lie is found in this order: the template's own `{% generation %}` marks; else by comparing ids, as
the ids of everything before an answer, with the header of an answer, must begin the ids of the whole; else by character
positions. No id is ever taken for a role: a tokenizer whose padding is its end token makes no difference.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatrain.data.adapt import REASONING_UNSEEN, TOOLS_UNSEEN, shapes
from megatrain.data.formats import BadRow, Conversation, Example, Pair, Text
from megatrain.data.spans import Span, char_spans, finish_span, has_every_turn
from megatrain.errors import DataError

# Used for conversations when a tokenizer has no template. Each answer ends with the tokenizer's end token.
FALLBACK_TEMPLATE = (
    "{{ bos_token if bos_token is defined and bos_token else '' }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'system' %}{{ message.content + '\\n\\n' }}"
    "{%- elif message.role == 'assistant' %}{{ '### Assistant:\\n' }}"
    "{% generation %}{{ message.content + (eos_token if eos_token is defined and eos_token else '') }}{% endgeneration %}{{ '\\n\\n' }}"
    "{%- else %}{{ '### User:\\n' + message.content + '\\n\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '### Assistant:\\n' }}{%- endif %}"
)
# Some templates print today's date by calling strftime_now; what a step holds must not depend on the day.
_DATE_PARTS = {"%Y": "2025", "%y": "25", "%m": "01", "%B": "January", "%b": "Jan", "%d": "01", "%A": "Wednesday", "%a": "Wed",
               "%H": "12", "%M": "00", "%S": "00"}  # fmt: skip
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f".replace('{mark}', '{value}')" for mark, value in _DATE_PARTS.items())
    + " }}{%- endmacro -%}"
)


@dataclass(frozen=True)
class Encoded:
    """Token ids of one example; mask[t] is True where token t is trained. `is_text`: may be split into documents."""

    ids: list[int]
    mask: list[bool]
    is_text: bool = False


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder, from its files alone. DataError when there is none."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        text = " ".join(str(error).split())[:300]
        problem = f"The model folder {folder} has no tokenizer that can be loaded: {text}"
        raise DataError(problem, "Choose a model that comes with its tokenizer.") from error


class Encoder:
    """Encodes examples with one tokenizer. `notes` counts what had to be changed so that the template takes a row."""

    def __init__(self, tokenizer: Any, train_on: str = "assistant") -> None:
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.notes: Counter[str] = Counter()
        self.used_template = "none"  # tokenizer | fallback, once a conversation was encoded
        self.template = None if tokenizer.chat_template else FALLBACK_TEMPLATE
        self.end_id: int | None = tokenizer.eos_token_id
        self.start_ids = _start_ids(tokenizer)
        self.end_ids, self.added_ids = _control_ids(tokenizer)
        self._header = self._trailer = ""
        self._learn_turns()

    @property
    def pad_id(self) -> int:
        """An id to fill packs with; it never has a label."""
        found = [index for index in (self.tokenizer.pad_token_id, self.end_id) if index is not None]
        return found[0] if found else 0

    def encode_all(self, examples: Iterable[Example]) -> list[Encoded | BadRow]:
        """One result per example, in order; BadRow, returned and not raised, where no example can be made.

        All their texts go to the tokenizer in one call, which spreads them over the processor's cores.
        """
        works = [self._work(example) for example in examples]
        ids = iter(self._ids_of([text for work in works if isinstance(work, _Work) for text in work.texts]))
        return [work.result(list(itertools.islice(ids, len(work.texts)))) if isinstance(work, _Work) else work for work in works]

    def encode(self, example: Example) -> Encoded:
        """Ids and mask of one example. BadRow when the template refuses it or no answer can be found in it."""
        result = self.encode_all([example])[0]
        if isinstance(result, BadRow):
            raise result
        return result

    def _work(self, example: Example) -> "_Work | BadRow":
        if isinstance(example, Text):
            return _Work([example.text], partial(self._text, example))
        if isinstance(example, Pair) and self.template is FALLBACK_TEMPLATE:
            return _Work([example.prompt + example.completion, example.prompt], partial(self._pair, example))
        if isinstance(example, Pair):
            messages = [{"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.completion}]
            example = Conversation(messages, [False, True])
        try:
            return self._conversation(example)
        except BadRow as reason:
            return reason

    def encode_prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids that a model is to continue with its answer; the beginning of what training on that answer sees."""
        _, rendered = self._render(Conversation(messages, [False] * len(messages)), add_generation_prompt=True)
        return self._ids_of([rendered])[0]

    def _ids_of(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def _offsets_of(self, text: str) -> list[tuple[int, int]]:
        if not self.tokenizer.is_fast:
            raise BadRow("the chat template and the tokenizer do not agree on where an answer begins")
        return self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]

    def _text(self, example: Text, ids: list[int]) -> Encoded:
        ids = (self.start_ids if example.begins else []) + ids
        if example.ends and self.end_id is not None and ids[-1:] != [self.end_id]:
            ids = [*ids, self.end_id]
        return Encoded(ids, [True] * len(ids), is_text=True)

    def _pair(self, pair: Pair, ids: list[int], before: list[int]) -> Encoded:
        """Prompt and completion as one text, for a tokenizer without a chat template; `before` are the prompt's ids."""
        if ids[: len(before)] == before:
            first = len(before)
        else:
            ends = [stop for _, stop in self._offsets_of(pair.prompt + pair.completion)]
            first = next((index for index, stop in enumerate(ends) if stop > len(pair.prompt)), len(ids))
        mask = [False] * first + [True] * (len(ids) - first)
        if self.end_id is not None and ids[-1:] != [self.end_id]:
            ids, mask = [*ids, self.end_id], [*mask, True]
        return self._finished(self.start_ids + ids, [False] * len(self.start_ids) + mask)

    def _finished(self, ids: list[int], mask: list[bool]) -> Encoded:
        return Encoded(ids, [True] * len(ids) if self.train_on == "everything" else mask)

    def _conversation(self, conversation: Conversation) -> "_Work":
        self.used_template = "fallback" if self.template else "tokenizer"
        conversation, text = self._render(conversation)
        if self.train_on == "everything":
            return _Work([text], lambda ids: self._masked(conversation, ids, [(0, len(ids))]))
        if self._has_marks(conversation):
            output = self._apply(conversation, conversation.messages, tokenize=True, return_assistant_tokens_mask=True)
            ids, marked = list(output["input_ids"]), _runs(output["assistant_masks"])
            if marked:
                spans = [self._finish(span, ids) for span in marked]
                return _Work([], lambda: self._masked(conversation, ids, spans))
        parts = self._parts(conversation, text)
        return _Work([text, *(part or "" for part in parts)], partial(self._compared, conversation, text, parts))

    def _parts(self, conversation: Conversation, text: str) -> list[str | None]:
        """For each trained turn the text up to its answer, header included, and the text up to its end."""
        parts: list[str | None] = []
        for index in (index for index, is_trained in enumerate(conversation.trained) if is_trained):
            ended = text if index + 1 == len(conversation.messages) else self._part(conversation, index + 1, False)
            parts += [self._part(conversation, index, True), ended]
        return parts

    def _compared(self, conversation: Conversation, text: str, parts: list[str | None], ids: list[int], *encoded: list[int]) -> Encoded:
        """Spans from the lengths of the parts' ids if each part's ids begin the whole's, else from characters."""
        if None in parts or any(ids[: len(part)] != part for part in encoded):
            spans = self._spans_by_characters(conversation, text)
        else:
            lengths = [len(part) for part in encoded]
            spans = list(zip(lengths[::2], lengths[1::2], strict=True))
        return self._masked(conversation, ids, [self._finish(span, ids) for span in spans])

    def _masked(self, conversation: Conversation, ids: list[int], spans: list[Span]) -> Encoded:
        mask = [False] * len(ids)
        for first, last in spans:
            mask[first:last] = [True] * (last - first)
        if conversation.messages[-1]["role"] == "assistant":
            self._end_last_turn(ids, mask, is_trained=conversation.trained[-1])
        return self._finished(ids, mask)

    def _end_last_turn(self, ids: list[int], mask: list[bool], is_trained: bool) -> None:
        """Appends the tokenizer's end token where the template ends the last answer with none."""
        last = len(ids)
        while last and self._is_blank(ids[last - 1]):
            last -= 1
        if last and ids[last - 1] in self.end_ids or self.end_id is None:
            return
        ids[last:], mask[last:] = [self.end_id], [is_trained]

    def _learn_turns(self) -> None:
        """Learns from an example how the template begins and ends an answer, where it does not say so itself.

        The token at the end is not marked as special in every model. Of the templates that know no generation prompt,
        some write the header of an answer only together with the answer (`_header`), and some write one at the end of
        every conversation, answered or not (`_trailer`, which is taken off).
        """
        example = Conversation([{"role": "user", "content": "qqq"}, {"role": "assistant", "content": "zzz"}], [False, True])
        self._trailer = self._written_always(self._part(example, 2, False) or "")
        whole, plain, header = self._part(example, 2, False), self._part(example, 1, False), self._part(example, 1, True)
        if whole is None or plain is None:
            return
        ids = [index for index in self._ids_of([whole])[0] if not self._is_blank(index)]
        self.end_ids |= set(ids[-1:]) & self.added_ids
        if header == plain and whole.startswith(plain):
            between = whole[len(plain) : whole.find("zzz", len(plain))]
            self._header = between if between.strip() else ""

    def _written_always(self, whole: str) -> str:
        """What stands behind the end token of the answer `zzz`, if it is the header that stands before it, too."""
        before, _, behind = whole.rpartition("zzz")
        found = [(behind.find(token), len(token)) for token in map(self.tokenizer.convert_ids_to_tokens, self.added_ids) if token in behind]
        start, length = min(found, default=(0, 0))
        rest = behind[start + length :].lstrip()
        return rest if rest and before.endswith(rest) else ""

    def _finish(self, span: Span, ids: list[int]) -> Span:
        return finish_span(span, ids, self.end_ids, self.added_ids, self._is_blank)

    def _is_blank(self, index: int) -> bool:
        return index not in self.added_ids and not self.tokenizer.decode([index]).strip()

    def _render(self, conversation: Conversation, add_generation_prompt: bool = False) -> tuple[Conversation, str]:
        """The first shape of the conversation that the template takes whole, and its text. BadRow when it takes none."""
        refusal: BadRow | None = None
        for note, shape in shapes(conversation):
            try:
                text = self._text_of(shape, shape.messages, add_generation_prompt)
            except BadRow as reason:
                refusal = refusal or reason
                continue
            if has_every_turn(shape, text):
                self.notes.update(filter(None, [note, *self._unseen(shape, text)]))
                return shape, text
            refusal = refusal or BadRow("the chat template leaves out a turn of the conversation")
        raise refusal or BadRow("the conversation is empty")

    def _unseen(self, conversation: Conversation, text: str) -> Iterator[str]:
        """What a conversation has besides its words and the template does not write."""
        reasoning = [message["reasoning_content"].strip() for message in conversation.messages if "reasoning_content" in message]
        if reasoning and not any(words in text for words in reasoning):
            yield REASONING_UNSEEN
        without = Conversation(conversation.messages, conversation.trained)
        if conversation.tools and self._text_of(without, without.messages, False) == text:
            yield TOOLS_UNSEEN

    def _part(self, conversation: Conversation, count: int, add_generation_prompt: bool) -> str | None:
        """The text of the first messages; None where the template refuses a conversation that stops there."""
        try:
            return self._text_of(conversation, conversation.messages[:count], add_generation_prompt) if count else None
        except BadRow:
            return None

    def _text_of(self, conversation: Conversation, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """The text of some messages, with the header of an answer behind them only if it is asked for."""
        text: str = self._apply(conversation, messages, add_generation_prompt=add_generation_prompt)
        return text + self._header if add_generation_prompt else text.removesuffix(self._trailer)

    def _apply(self, conversation: Conversation, messages: list[dict[str, Any]], tokenize: bool = False, **kwargs: Any) -> Any:
        """The template's output for some of the messages: a string, or with `tokenize` a dict with `input_ids`."""
        import jinja2

        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=conversation.tools or None, chat_template=self._template_for(conversation), tokenize=tokenize,
                return_dict=tokenize, **kwargs)  # fmt: skip
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            # A template is a program that comes with the model, and any of these is its way to refuse a row.
            text = " ".join(str(error).split())[:160]
            raise BadRow(f"the chat template refuses the conversation: {text}") from error

    def _template_for(self, conversation: Conversation) -> str:
        template: str = self.template or self.tokenizer.get_chat_template(None, conversation.tools or None)
        return _FIXED_DATE + template if "strftime_now" in template else template

    def _has_marks(self, conversation: Conversation) -> bool:
        num_answers = sum(message["role"] == "assistant" for message in conversation.messages)
        if not self.tokenizer.is_fast or sum(conversation.trained) < num_answers:
            return False
        return "endgeneration" in self._template_for(conversation)

    def _spans_by_characters(self, conversation: Conversation, text: str) -> list[Span]:
        ends = [self.tokenizer.convert_ids_to_tokens(index) for index in self.end_ids]
        offsets = self._offsets_of(text)
        spans = []
        for start, stop in char_spans(conversation, text, lambda count, header: self._part(conversation, count, header), ends):
            inside = [index for index, (first, last) in enumerate(offsets) if last > start and first < stop]
            if inside:
                spans.append((inside[0], inside[-1] + 1))
        return spans


@dataclass(frozen=True)
class _Work:
    """Texts to be encoded, and what makes an example of their ids."""

    texts: list[str]
    finish: Callable[..., Encoded]

    def result(self, ids: list[list[int]]) -> Encoded | BadRow:
        try:
            return self.finish(*ids)
        except BadRow as reason:
            return reason


def _runs(marks: list[int]) -> list[Span]:
    """(first, behind the last) of each run of ones."""
    padded = [0, *marks, 0]
    borders = [index for index in range(len(marks) + 1) if bool(padded[index]) != bool(padded[index + 1])]
    return list(zip(borders[::2], borders[1::2], strict=True))


def _control_ids(tokenizer: Any) -> tuple[set[int], set[int]]:
    """(ids that may end a turn, all ids added to the vocabulary that are not blank).

    The first lacks BOS and the unknown token: an answer that ends in an unknown character has not ended.
    """
    added = {index: token for index, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    special = {index for index, token in added.items() if token.special} | set(tokenizer.all_special_ids)
    never = {tokenizer.unk_token_id, tokenizer.bos_token_id} - {tokenizer.eos_token_id}
    return special - never, (added.keys() | special) - never


def _start_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text, usually the BOS token or nothing."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return list(full[:start])
    return []
