"""Text -> token ids, with the character that each token begins at; and words that look like control tokens.

A text may be cut into pieces at BREAK: each piece is encoded alone, so that a control token which stands in a row's
words ("<|im_end|>" in a question about chat formats) is encoded as the characters that it is. Nothing of BREAK is left.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

BREAK = "\U0010fffd"  # a private character that no text has
ZERO_WIDTH = "\u200b"  # stands in its place where pieces cannot be joined again


class Tokens:
    """The ids of one text."""

    def __init__(self, ids: list[int], encodings: Sequence[Any], starts: list[int], firsts: list[int]) -> None:
        self.ids = ids
        self._encodings, self._starts, self._firsts = encodings, starts, firsts

    def boundary(self, character: int) -> int | None:
        """The index of the token that begins exactly at a character; None where there is none, or where nobody knows."""
        piece = bisect_right(self._starts, character) - 1
        if piece < 0 or piece >= len(self._encodings):
            return None
        inside = character - self._starts[piece]
        index = self._encodings[piece].char_to_token(inside)
        if index is None or self._encodings[piece].token_to_chars(index)[0] != inside:
            return None
        if index and self._encodings[piece].token_to_chars(index - 1)[0] == inside:
            return None  # one of several tokens of one character
        return self._firsts[piece] + index

    def overlapping(self, start: int, stop: int) -> tuple[int, int] | None:
        """(first, behind the last) token that holds a character of start..stop."""
        found = [
            first + index
            for encoding, begin, first in zip(self._encodings, self._starts, self._firsts, strict=True)
            for index, (left, right) in enumerate(encoding.offsets)
            if begin + right > start and begin + left < stop
        ]
        return (found[0], found[-1] + 1) if found else None


class Vocabulary:
    """A tokenizer's way from text to ids, without any token added to the text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.has_offsets = bool(tokenizer.is_fast)
        if self.has_offsets:
            self._fast = tokenizer.backend_tokenizer
            self._fast.no_truncation()
            self._fast.no_padding()
            self._fast.encode_special_tokens = False
        self.can_join = self._joins()
        self._known: dict[str, list[int]] = {}

    def _joins(self) -> bool:
        """Whether the ids of two pieces are those of a text that holds both: tokenizers that begin a text with a space cannot."""
        pieces = [index for text in ("ab<", "|cd") for index in self.ids_of([text])[0]]
        return self._tokenizer.decode(pieces, clean_up_tokenization_spaces=False).strip() == "ab<|cd"

    def ids_of(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        if self.has_offsets:
            return [encoding.ids for encoding in self._fast.encode_batch_fast(texts, add_special_tokens=False)]
        return self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def known(self, text: str) -> list[int]:
        """The ids of a short text that comes again and again."""
        if text not in self._known:
            if len(self._known) > 10_000:
                self._known.clear()
            self._known[text] = self.ids_of([text])[0]
        return self._known[text]

    def tokens_of(self, texts: Iterable[str], with_offsets: bool = True) -> list[Tokens]:
        """All texts in one call, which spreads them over the processor's cores. Texts may hold BREAK."""
        cut = [text.split(BREAK) if BREAK in text else [text] for text in texts]
        pieces = [piece for parts in cut for piece in parts]
        if self.has_offsets and with_offsets:
            encodings = self._fast.encode_batch(pieces, add_special_tokens=False) if pieces else []
            ids = [encoding.ids for encoding in encodings]
        else:
            encodings, ids = [], self.ids_of(pieces)
        made, at = [], 0
        for parts in cut:
            span = slice(at, at + len(parts))
            at += len(parts)
            if len(parts) == 1:
                made.append(Tokens(ids[span.start], encodings[span], [0], [0]))
                continue
            starts: list[int] = []
            firsts: list[int] = []
            joined: list[int] = []
            position = 0
            for part, part_ids in zip(parts, ids[span], strict=True):
                starts.append(position)
                firsts.append(len(joined))
                joined += part_ids
                position += len(part) + len(BREAK)
            made.append(Tokens(joined, encodings[span], starts, firsts))
        return made


class Escape:
    """Breaks control tokens that stand in words. `count` is how many were found."""

    def __init__(self, control_tokens: Iterable[str], mark: str) -> None:
        tokens = sorted({token for token in control_tokens if len(token) > 1}, key=len, reverse=True)
        self._everywhere = self._pattern(tokens)
        # A model that thinks writes its marks itself, and data holds them within the answers.
        self._in_answers = self._pattern([token for token in tokens if "think" not in token.lower()])
        self._mark = mark

    @staticmethod
    def _pattern(tokens: list[str]) -> re.Pattern[str] | None:
        return re.compile("|".join(map(re.escape, tokens))) if tokens else None

    def text(self, text: str, is_answer: bool = False) -> str:
        """The text, with a mark behind the first character of each control token."""
        pattern = self._in_answers if is_answer else self._everywhere
        if pattern is None or not pattern.search(text):
            return text
        return pattern.sub(lambda found: found[0][0] + self._mark + found[0][1:], text.replace(BREAK, "\ufffd"))

    def value(self, value: Any, is_answer: bool = False) -> Any:
        """The same for every string inside a message, a tool call or a description of tools."""
        if isinstance(value, str):
            return self.text(value, is_answer)
        if isinstance(value, dict):
            return {key: self.value(item, is_answer) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item, is_answer) for item in value]
        return value
