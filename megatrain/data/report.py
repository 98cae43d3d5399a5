"""DataReport: what became of every row, in numbers and plain words. It is kept with the run."""

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MAX_EXAMPLES = 3
MAX_REASONS = 30  # further reasons are counted together
OTHER_REASONS = "other reasons"
_EXCERPT_CHARACTERS = 200


@dataclass(frozen=True)
class DataReport:
    """Counts of one prepared data set. `dropped` and `examples` are by reason; examples are (row number, excerpt)."""

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
    cache_key: str = ""  # names the tokens that the run uses; a resume asks for them by it

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=1)

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> "DataReport":
        known = {item.name for item in dataclasses.fields(DataReport)}
        values = {key: value for key, value in raw.items() if key in known}
        values["examples"] = {reason: [(number, text) for number, text in rows] for reason, rows in raw["examples"].items()}
        return DataReport(**values)

    @staticmethod
    def from_json(text: str) -> "DataReport":
        return DataReport.from_dict(json.loads(text))


class Tally:
    """Counts while rows are read."""

    def __init__(self) -> None:
        self.read = self.kept = self.cut = self.tokens = self.trained_tokens = self.largest_id = 0
        self.dropped: Counter[str] = Counter()
        self.examples: dict[str, list[tuple[int, str]]] = {}

    def drop(self, reason: str, number: int, place: str, values: Any) -> None:
        """One row is not used. The excerpt says where it is and how it begins."""
        if reason not in self.dropped and len(self.dropped) >= MAX_REASONS:
            reason = OTHER_REASONS
        self.dropped[reason] += 1
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
    text = json.dumps(values, ensure_ascii=False, default=str)
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= _EXCERPT_CHARACTERS else text[: _EXCERPT_CHARACTERS - 1] + "…"
