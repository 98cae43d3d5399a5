"""DataReport: what became of every row, in numbers and plain words. It is kept with the run."""

import dataclasses
import json
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from megatrain.errors import DataError

MAX_EXAMPLES = 3
MAX_REASONS = 30  # further reasons are counted together
OTHER_REASONS = "other reasons"
CUT = "longer than the sequence length: cut"
SPLIT = "longer than the sequence length: split"
DUPLICATE = "the same as an earlier row"
LENGTH_EDGES = sorted({round(2 ** (half / 2)) for half in range(4, 61)})
_EXCERPT_CHARACTERS = 200


class NothingTrainedError(DataError):
    """No row gives a token to train on."""


@dataclass(frozen=True)
class DataReport:
    """Counts of one prepared data set. `dropped` and `examples` are by reason; examples are (row number, excerpt).

    `examples` also has entries for CUT, SPLIT and DUPLICATE, whose rows are not dropped. `length_histogram` counts the rows
    by their tokens before anything is cut: (most tokens, rows), ascending; the pairs of two halves of an octave.
    """

    format: str
    source: str
    rows_read: int
    rows_kept: int
    rows_cut: int
    dropped: dict[str, int]
    examples: dict[str, list[tuple[int, str]]]
    tokens: int
    trained_tokens: int
    largest_id: int = 0  # the largest token id: a model must have more embeddings than this
    eval_rows: int = 0
    num_packs: int = 0
    packing_efficiency: float = 0.0  # real tokens / (packs x sequence length), training packs
    template: str = "none"  # which chat template was used: tokenizer | fallback | none
    notes: list[str] = field(default_factory=list)
    rows_split: int = 0
    duplicates: int = 0  # rows whose tokens are those of an earlier row
    eval_overlap: int = 0  # held-out rows whose tokens are also trained on
    length_histogram: list[tuple[int, int]] = field(default_factory=list)
    longest_row: int = 0  # tokens
    rows_escaped: int = 0  # rows whose words hold control tokens
    sources: list[dict[str, Any]] = field(default_factory=list)  # of a mixture: name, weight, rows, tokens, packs an epoch, share
    chat_template: str = ""  # the template itself, where it is not the tokenizer's own
    complete: bool = True  # False while the rest of the data is tokenised beside the training
    cache_key: str = ""  # names the tokens that the run uses; a resume asks for them by it

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=1)

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> "DataReport":
        known = {item.name for item in dataclasses.fields(DataReport)}
        values = {key: value for key, value in raw.items() if key in known}
        values["length_histogram"] = [(most, count) for most, count in raw.get("length_histogram", [])]
        values["examples"] = {reason: [(number, text) for number, text in rows] for reason, rows in raw["examples"].items()}
        return DataReport(**values)

    @staticmethod
    def from_json(text: str) -> "DataReport":
        return DataReport.from_dict(json.loads(text))


    @property
    def trained_share(self) -> float:
        return self.trained_tokens / self.tokens if self.tokens else 0.0


class Tally:
    """Counts while rows are read. `to_dict` and `from_dict` carry it over to another process."""

    COUNTS = ("read", "kept", "cut", "split", "tokens", "trained_tokens", "largest_id", "longest")

    def __init__(self) -> None:
        self.read = self.kept = self.cut = self.split = self.tokens = self.trained_tokens = self.largest_id = self.longest = 0
        self.dropped: Counter[str] = Counter()
        self.examples: dict[str, list[tuple[int, str]]] = {}
        self.lengths: Counter[int] = Counter()

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.COUNTS} | {
            "dropped": dict(self.dropped), "examples": self.examples, "lengths": self.histogram()}  # fmt: skip

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> "Tally":
        tally = Tally()
        for name in Tally.COUNTS:
            setattr(tally, name, raw[name])
        tally.dropped.update(raw["dropped"])
        tally.examples = {reason: [(number, text) for number, text in rows] for reason, rows in raw["examples"].items()}
        tally.lengths.update({most: count for most, count in raw["lengths"]})
        return tally

    def histogram(self) -> list[tuple[int, int]]:
        return sorted(self.lengths.items())

    def length(self, num_tokens: int) -> None:
        """One row of this many tokens, before anything is cut."""
        self.lengths[LENGTH_EDGES[min(bisect_left(LENGTH_EDGES, num_tokens), len(LENGTH_EDGES) - 1)]] += 1
        self.longest = max(self.longest, num_tokens)

    def drop(self, reason: str, number: int, place: str, values: Any) -> None:
        """One row is not used. The excerpt says where it is and how it begins."""
        if reason not in self.dropped and len(self.dropped) >= MAX_REASONS:
            reason = OTHER_REASONS
        self.dropped[reason] += 1
        self.show(reason, number, place, values)

    def show(self, reason: str, number: int, place: str, values: Any) -> None:
        """One row is an example, if there are not enough yet."""
        shown = self.examples.setdefault(reason, [])
        if len(shown) < MAX_EXAMPLES:
            shown.append((number, f"{place}: {excerpt(values)}" if values else place))

    def problem(self) -> str:
        """The dropped rows in one sentence, the most frequent reason first, each with an example."""
        parts = []
        for reason, count in self.dropped.most_common(3):
            number, text = self.examples[reason][0]
            parts.append(f"{count} {'row' if count == 1 else 'rows'}: {reason} (row {number}, {text})")
        return "; ".join(parts)


def excerpt(values: Any) -> str:
    """The beginning of a row as JSON; anything that is not JSON as its text."""
    try:
        text = json.dumps(values, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are no text, endless nesting
        text = str(values)
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= _EXCERPT_CHARACTERS else text[: _EXCERPT_CHARACTERS - 1] + "…"
