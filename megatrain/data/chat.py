"""Examples -> token ids and their loss mask, through the tokenizer's own chat template.

A token is trained when the model has to write it: everything that an assistant says, and the end token of each of its
turns, without which a model never stops. Nothing of a prompt, and nothing that the template adds behind an end token.

Where the answers lie is found in this order: the template's own `{% generation %}` marks; else by comparing ids, as
the ids of everything before an answer, with the header of an answer, must begin the ids of the whole; else by character
positions. As no token reaches across a control token, it is enough to compare the ids from the last one on, and that
the next token begins where the answer does. No id is ever taken for a role: a tokenizer whose padding is its end token
makes no difference.

Control tokens are written by the template alone. Where the words of a row hold one they are encoded as characters.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatrain.data.adapt import CONTROL_TOKENS_ESCAPED, REASONING_UNSEEN, TOOLS_UNSEEN, shapes
from megatrain.data.formats import BadRow, Conversation, Example, Pair, Text
from megatrain.data.render import ChatTemplate
from megatrain.data.spans import Span, char_spans, find_ids, finish_span, has_every_turn, visible_words
from megatrain.data.tokens import BREAK, ZERO_WIDTH, Escape, Tokens, Vocabulary
from megatrain.errors import DataError


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

    def __init__(self, tokenizer: Any, train_on: str = "assistant", chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        self.train_on = train_on
        self.notes: Counter[str] = Counter()
        self.used_template = "none"  # tokenizer | fallback | chosen, once a conversation was encoded
        self.template = ChatTemplate(tokenizer, chat_template)
        self.end_id: int | None = tokenizer.eos_token_id
        self.start_ids = _start_ids(tokenizer)
        self.end_ids, self.added_ids = _control_ids(tokenizer)
        added = {index: token for index, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        self._atoms = set(added)  # no token reaches across one of these; those of white space are no control tokens
        self._special_ids = {index for index, token in added.items() if token.special}
        self._structure: list[str] = []  # the control tokens that the template writes
        self._escape = Escape((), BREAK)
        self._around = ("", "")  # header and end of an answer, where they are always the same
        self._learn_turns()
        self._learn_control_tokens()

    @property
    def pad_id(self) -> int:
        """An id to fill packs with; it never has a label."""
        found = [index for index in (self.tokenizer.pad_token_id, self.end_id) if index is not None]
        return found[0] if found else 0

    def encode_all(self, examples: Iterable[Example]) -> list[Encoded | BadRow]:
        """One result per example, in order; BadRow, returned and not raised, where no example can be made.

        All their texts go to the tokenizer in one call, which spreads them over the processor's cores.
        """
        works = [self._work(self._escaped(example)) for example in examples]
        tokens = {needed: iter(self.vocabulary.tokens_of([work.text for work in works if isinstance(work, _Work) and work.by_ids != needed],
                                                         needed)) for needed in (True, False)}  # fmt: skip
        return [work.result(next(tokens[not work.by_ids])) if isinstance(work, _Work) else work for work in works]

    def encode(self, example: Example) -> Encoded:
        """Ids and mask of one example. BadRow when the template refuses it or no answer can be found in it."""
        result = self.encode_all([example])[0]
        if isinstance(result, BadRow):
            raise result
        return result

    def _escaped(self, example: Example) -> Example:
        """The example with the control tokens in its words broken, so that none is encoded as one."""
        found: Example
        if isinstance(example, Text):
            text = self._escape.text(example.text)
            found = example if text == example.text else replace(example, text=text)
        elif isinstance(example, Pair):
            found = Pair(self._escape.text(example.prompt), self._escape.text(example.completion, is_answer=True))
        else:
            messages = [self._escape.value(message, message["role"] == "assistant") for message in example.messages]
            found = Conversation(messages, example.trained, self._escape.value(example.tools))
        if found != example:
            self.notes[CONTROL_TOKENS_ESCAPED] += 1
        return found

    def _work(self, example: Example) -> "_Work | BadRow":
        if isinstance(example, Text):
            return _Work(example.text, partial(self._text, example), by_ids=True)
        if isinstance(example, Pair) and self.template.kind == "fallback":
            return _Work(example.prompt + example.completion, partial(self._pair, example))
        if isinstance(example, Pair):
            messages = [{"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.completion}]
            example = Conversation(messages, [False, True])
        try:
            return self._conversation(example)
        except BadRow as reason:
            return reason

    def template_notes(self) -> list[str]:
        """What is odd about a chosen template."""
        if self.used_template != "chosen" or set(self._structure) - {self.tokenizer.bos_token}:
            return []
        return ["The chosen chat template writes no control token that the tokenizer knows; its marks are encoded as plain text."]

    def encode_prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids that a model is to continue with its answer; the beginning of what training on that answer sees."""
        prompt = self._escaped(Conversation(messages, [False] * len(messages)))
        assert isinstance(prompt, Conversation)
        _, rendered = self._render(prompt, add_generation_prompt=True)
        return self._ids_of(rendered)

    def _ids_of(self, text: str) -> list[int]:
        return self.vocabulary.tokens_of([text])[0].ids

    def _text(self, example: Text, tokens: Tokens) -> Encoded:
        ids = tokens.ids
        if example.begins and self.start_ids:
            ids = self.start_ids + ids
        if example.ends and self.end_id is not None and ids[-1:] != [self.end_id]:
            ids.append(self.end_id)
        return Encoded(ids, [True] * len(ids), is_text=True)

    def _pair(self, pair: Pair, tokens: Tokens) -> Encoded:
        """Prompt and completion as one text, for a tokenizer without a chat template."""
        ids, before = tokens.ids, self._ids_of(pair.prompt)
        if ids[: len(before)] == before:
            first = len(before)
        else:
            span = self._overlapping(tokens, len(pair.prompt), len(pair.prompt) + len(pair.completion))
            first = span[0] if span else len(ids)
        mask = [False] * first + [True] * (len(ids) - first)
        if self.end_id is not None and ids[-1:] != [self.end_id]:
            ids, mask = [*ids, self.end_id], [*mask, True]
        return self._finished(self.start_ids + ids, [False] * len(self.start_ids) + mask)

    def _overlapping(self, tokens: Tokens, start: int, stop: int) -> Span | None:
        if not self.vocabulary.has_offsets:
            raise BadRow("the chat template and the tokenizer do not agree on where an answer begins")
        return tokens.overlapping(start, stop)

    def _finished(self, ids: list[int], mask: list[bool]) -> Encoded:
        return Encoded(ids, [True] * len(ids) if self.train_on == "everything" else mask)

    def _conversation(self, conversation: Conversation) -> "_Work":
        self.used_template = self.template.kind
        conversation, text = self._render(conversation)
        if self.train_on == "everything":
            return _Work(text, lambda tokens: self._masked(conversation, tokens.ids, [(0, len(tokens.ids))]))
        marked = self._marked_spans(conversation, text) if self._has_marks(conversation) else []
        if marked:
            return _Work(text, partial(self._from_marks, conversation, marked))
        if self._is_plain(conversation, text):
            return _Work(text, partial(self._by_ids, conversation, text), by_ids=True)
        return _Work(text, partial(self._compared, conversation, text))

    def _marked_spans(self, conversation: Conversation, text: str) -> list[Span]:
        """Character positions of what the template marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, spans = render_jinja_template(
            [conversation.messages], tools=conversation.tools or None, chat_template=self.template.template_for(conversation),
            return_assistant_tokens_mask=True, **self.tokenizer.special_tokens_map)  # fmt: skip
        return [(start, stop) for start, stop in spans[0] if stop > start] if rendered[0].startswith(text) else []

    def _from_marks(self, conversation: Conversation, marked: list[Span], tokens: Tokens) -> Encoded:
        found = [tokens.overlapping(start, stop) for start, stop in marked]
        return self._masked(conversation, tokens.ids, [self._finish(span, tokens.ids) for span in found if span])

    def _is_plain(self, conversation: Conversation, text: str) -> bool:
        """Whether each answer stands between the template's usual header and end token.

        Both begin with a control token, and no row can hold one: so the headers in the text are those of the answers, in order.
        """
        turns = [message for message in conversation.messages if message["role"] == "assistant"]
        header, end = self._around
        if not header or text.count(header) != len(turns):
            return False
        at = 0
        for message in turns:
            start = text.find(header, at) + len(header)
            at = text.find(end, start)
            if at < 0 or visible_words(message) not in text[start:at]:
                return False
        return True

    def _by_ids(self, conversation: Conversation, text: str, tokens: Tokens) -> Encoded:
        """Spans from behind the ids of each header to its end token. As the header's ids stand there as they are alone, those
        of everything before an answer begin the whole's."""
        ids, (header, end) = tokens.ids, (self.vocabulary.known(part) for part in self._around)
        trained = [is_trained for message, is_trained in zip(conversation.messages, conversation.trained, strict=True)
                   if message["role"] == "assistant"]  # fmt: skip
        spans: list[Span] = []
        at = 0
        for is_trained in trained:
            start, stop = find_ids(ids, header, at)
            at = find_ids(ids, end, start)[1] if start >= 0 else -1
            if at < 0:
                return self._compared(conversation, text, self.vocabulary.tokens_of([text])[0])
            if is_trained:
                spans.append((stop, at))
        return self._masked(conversation, ids, [self._finish(span, ids) for span in spans])

    def _parts(self, conversation: Conversation, text: str) -> list[str | None]:
        """For each trained turn the text up to its answer, header included, and the text up to its end."""
        parts: list[str | None] = []
        for index in (index for index, is_trained in enumerate(conversation.trained) if is_trained):
            ended = text if index + 1 == len(conversation.messages) else self.template.part(conversation, index + 1, False)
            parts += [self.template.part(conversation, index, True), ended]
        return parts

    def _compared(self, conversation: Conversation, text: str, tokens: Tokens) -> Encoded:
        """Spans between the parts' borders if each part's ids begin the whole's, else from characters."""
        borders = [self._border(text, part, tokens) for part in self._parts(conversation, text)]
        if None in borders:
            spans = self._spans_by_characters(conversation, text, tokens)
        else:
            spans = list(zip(borders[::2], borders[1::2], strict=True))  # type: ignore[arg-type]
        return self._masked(conversation, tokens.ids, [self._finish(span, tokens.ids) for span in spans])

    def _border(self, text: str, part: str | None, tokens: Tokens) -> int | None:
        """How many ids of the whole a part of it has; None where its own ids do not begin the whole's."""
        if part is None:
            return None
        if len(part) == len(text):
            return len(tokens.ids) if part == text else None
        start = max((part.rfind(token, max(len(part) - 200, 0)) for token in self._structure), default=-1)
        index = tokens.boundary(len(part)) if start >= 0 and text.startswith(part) else None
        if index is not None and BREAK not in part[start:]:
            known = self.vocabulary.known(part[start:])
            if tokens.ids[max(index - len(known), 0) : index] == known:
                return index
        ids = self._ids_of(part)
        return len(ids) if tokens.ids[: len(ids)] == ids else None

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
        some write the header of an answer only together with the answer (`header`), and some write one at the end of
        every conversation, answered or not (`trailer`, which is taken off).
        """
        example = Conversation([{"role": "user", "content": "qqq"}, {"role": "assistant", "content": "zzz"}], [False, True])
        added = [str(token) for token in self.tokenizer.convert_ids_to_tokens(sorted(self.added_ids))]
        self.template.learn_trailer(self.template.part(example, 2, False) or "", added)
        whole, plain = (self.template.part(example, count, False) for count in (2, 1))
        header = self.template.part(example, 1, True)
        if whole is None or plain is None:
            return
        written = self._ids_of(whole)
        ids = [index for index in written if not self._is_blank(index)]
        self.end_ids |= set(ids[-1:]) & self.added_ids
        self._structure = [str(self.tokenizer.convert_ids_to_tokens(index)) for index in set(written) & self._atoms]
        self._around = self._frame(whole, plain, header)
        if header == plain and whole.startswith(plain):
            between = whole[len(plain) : whole.find("zzz", len(plain))]
            self.template.header = between if between.strip() else ""

    def _frame(self, whole: str, plain: str, header: str | None) -> tuple[str, str]:
        """What stands before an answer, and the control token behind it.

        Both empty unless both begin with a control token: only then can no row hold them.
        """
        start = whole.find("zzz")
        if header is None or not header.startswith(plain) or not whole.startswith(header) or start < len(header):
            return "", ""
        before, behind = header[len(plain) :], whole[start + 3 :]
        end = next((token for token in self._structure if behind.startswith(token)), "")
        return (before, end) if end and any(before.startswith(token) for token in self._structure) else ("", "")

    def _learn_control_tokens(self) -> None:
        """What may not come from a row: every special token, what ends a turn, and what the template writes around a question."""
        question = self.template.part(Conversation([{"role": "user", "content": "qqq"}], [False]), 1, False) or ""
        control = (set(self._ids_of(question)) | self.end_ids) & self._atoms | self._special_ids
        texts = map(str, self.tokenizer.convert_ids_to_tokens(sorted(control)))
        self._escape = Escape(texts, BREAK if self.vocabulary.can_join else ZERO_WIDTH)

    def _finish(self, span: Span, ids: list[int]) -> Span:
        return finish_span(span, ids, self.end_ids, self.added_ids, self._is_blank)

    def _is_blank(self, index: int) -> bool:
        return index not in self.added_ids and not self.tokenizer.decode([index]).strip()

    def _render(self, conversation: Conversation, add_generation_prompt: bool = False) -> tuple[Conversation, str]:
        """The first shape of the conversation that the template takes whole, and its text. BadRow when it takes none."""
        refusal: BadRow | None = None
        for note, shape in shapes(conversation):
            try:
                text = self.template.text_of(shape, shape.messages, add_generation_prompt)
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
        if conversation.tools and self.template.text_of(without, without.messages, False) == text:
            yield TOOLS_UNSEEN

    def _has_marks(self, conversation: Conversation) -> bool:
        num_answers = sum(message["role"] == "assistant" for message in conversation.messages)
        if not self.tokenizer.is_fast or sum(conversation.trained) < num_answers:
            return False
        return "endgeneration" in self.template.template_for(conversation)

    def _spans_by_characters(self, conversation: Conversation, text: str, tokens: Tokens) -> list[Span]:
        ends = [self.tokenizer.convert_ids_to_tokens(index) for index in self.end_ids]
        spans = char_spans(conversation, text, lambda count, header: self.template.part(conversation, count, header), ends)
        return [span for start, stop in spans if (span := self._overlapping(tokens, start, stop))]


@dataclass(frozen=True)
class _Work:
    """A text to be encoded, and what makes an example of its tokens."""

    text: str
    finish: Callable[[Tokens], Encoded]
    by_ids: bool = False  # the ids are enough, which the tokenizer gives faster than ids with characters

    def result(self, tokens: Tokens) -> Encoded | BadRow:
        try:
            return self.finish(tokens)
        except BadRow as reason:
            return reason


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
