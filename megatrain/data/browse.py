"""The process behind a Preview: `python -m megatrain.data.browse` answers JSON lines on standard input; see preview.py."""

import itertools
import json
import os
import queue
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.config import RunConfig
from megatrain.data.chat import Encoded, Encoder, load_tokenizer
from megatrain.data.files import Row
from megatrain.data.formats import BadRow, Conversation, Example, Pair, Text, read_row
from megatrain.data.prepare import prepare
from megatrain.data.recipes import Part, parts
from megatrain.data.report import NothingTrainedError
from megatrain.data.sources import Source, open_source
from megatrain.data.tokenise import SNIFFED_ROWS, chosen_format, fitted
from megatrain.data.torchless import hide_torch
from megatrain.errors import DataError, MegaTrainError

KEPT_ROWS = 5_000  # rows that can be gone back to without reading the source again
SCANNED_ROWS = 50_000  # of one search; it can be gone on with
_TEXT_CHARACTERS = 100_000  # of one turn or value: a page shows no more


@dataclass
class Shown:
    """One source of the data, as it is read."""

    part: Part
    source: Source
    format: str
    columns: list[str]


@dataclass
class Browser:
    """Rows by their number, through all sources. `encoders` has one encoder per source, none without a tokenizer."""

    config: RunConfig
    tokenizer_folder: Path | None
    cache_folder: Path
    shown: list[Shown] = field(init=False)
    encoders: list[Encoder] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.shown = []
        for part in parts(self.config.data):
            source = open_source(part.config)
            first = list(itertools.islice(source.rows(), SNIFFED_ROWS))
            format, _ = chosen_format(part.config, source, enumerate(first, 1))
            columns = dict.fromkeys(name for row in first for name in row.values)
            self.shown.append(Shown(part, source, format, list(columns)))
        if self.tokenizer_folder is not None:
            tokenizer = load_tokenizer(self.tokenizer_folder)
            configs = [shown.part.config for shown in self.shown]
            self.encoders = [Encoder(tokenizer, config.train_on, config.chat_template) for config in configs]
        self._restart()

    def about(self) -> dict[str, Any]:
        sources = [{"name": shown.source.name, "format": shown.format, "weight": shown.part.weight, "columns": shown.columns,
                    "total": shown.source.total, "notes": list(shown.source.notes)} for shown in self.shown]  # fmt: skip
        return {"sources": sources, "has_tokenizer": bool(self.encoders),
                "template": self.encoders[0].template.kind if self.encoders else "none"}  # fmt: skip

    def _restart(self) -> None:
        self._coming = self._all_rows()
        self._kept: list[tuple[int, Row]] = []
        self._first = 1  # the number of the first row that is kept

    def _all_rows(self) -> Iterator[tuple[int, Row]]:
        for index, shown in enumerate(self.shown):
            for row in itertools.islice(shown.source.rows(), shown.part.config.max_rows):
                yield index, row

    def _row(self, number: int) -> tuple[int, Row] | None:
        """(source, row); None behind the last one."""
        if number < self._first:
            self._restart()
        while number >= self._first + len(self._kept):
            found = next(self._coming, None)
            if found is None:
                return None
            self._kept.append(found)
            if len(self._kept) > 2 * KEPT_ROWS:
                self._first += KEPT_ROWS
                del self._kept[:KEPT_ROWS]
        return self._kept[number - self._first]

    def rows(self, start: int, count: int) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        for number in range(start + 1, start + 1 + min(count, 1000)):
            row = self._row(number)
            if row is None:
                return {"rows": found, "more": False}
            found.append(self._described(number, *row))
        return {"rows": found, "more": self._row(start + 1 + count) is not None}

    def _described(self, number: int, source: int, row: Row) -> dict[str, Any]:
        problem, turns = "", []
        try:
            turns = _turns(read_row(row, self.shown[source].format, self.shown[source].part.config.text_column))
        except BadRow as reason:
            problem = str(reason)
        return {"row": number, "source": self.shown[source].source.name, "place": row.place, "problem": problem, "turns": turns,
                "values": _plain(row.values)}  # fmt: skip

    def search(self, text: str, start: int, limit: int) -> dict[str, Any]:
        wanted = text.casefold()
        found: list[dict[str, Any]] = []
        for number in range(start, start + SCANNED_ROWS):
            row = self._row(number)
            if row is None:
                return {"rows": found, "next": 0}
            if wanted in json.dumps(row[1].values, ensure_ascii=False, default=str).casefold() or wanted in row[1].place.casefold():
                found.append(self._described(number, *row))
                if len(found) >= limit:
                    return {"rows": found, "next": number + 1}
        return {"rows": found, "next": start + SCANNED_ROWS}

    def tokens(self, number: int) -> dict[str, Any]:
        if not self.encoders:
            raise DataError("There is no tokenizer to show tokens with.", "Choose a model first.")
        found = self._row(number)
        if found is None:
            raise DataError(f"There is no row {number}.", "Take one of the rows before.")
        index, row = found
        shown, encoder = self.shown[index], self.encoders[index]
        answer: dict[str, Any] = {"row": number, "place": row.place, "problem": "", "change": "", "documents": [], "length": 0}
        try:
            example = read_row(row, shown.format, shown.part.config.text_column)
            encoded = encoder.encode(example)
            answer["length"] = len(encoded.ids)
            documents, answer["change"] = fitted(encoded, example, shown.part.config, encoder)
        except BadRow as reason:
            answer["problem"] = str(reason)
            documents = []
        answer["documents"] = [_tokens(encoder, Encoded(ids, mask)) for ids, mask in documents]
        answer["tokens"] = sum(len(ids) for ids, _ in documents)
        answer["trained_tokens"] = sum(sum(mask[1:]) for _, mask in documents)
        return answer

    def statistics(self, cancelled: threading.Event) -> dict[str, Any]:
        if self.tokenizer_folder is None:
            raise DataError("There is no tokenizer to count tokens with.", "Choose a model first.")
        made = prepare(self.config, self.tokenizer_folder, self.cache_folder, lambda phase: _say(done=phase.done, total=phase.total),
                       cancelled.is_set)  # fmt: skip
        return {**made.report.to_dict(), "trained_share": made.report.trained_share, "steps_per_epoch": made.loader.steps_per_epoch}


def _turns(example: Example) -> list[dict[str, Any]]:
    match example:
        case Conversation(messages=messages, trained=trained):
            return [{"role": message["role"], "text": _plain(message["content"]), "trained": is_trained,
                     "reasoning": _plain(message.get("reasoning_content", "")), "calls": _plain(message.get("tool_calls", []))}
                    for message, is_trained in zip(messages, trained, strict=True)]  # fmt: skip
        case Pair(prompt=prompt, completion=completion):
            spoken = [("prompt", prompt, False), ("completion", completion, True)]
        case Text(text=words):
            spoken = [("text", words, True)]
    return [{"role": role, "text": _plain(words), "trained": is_trained, "reasoning": "", "calls": []}
            for role, words, is_trained in spoken]  # fmt: skip


def _tokens(encoder: Encoder, document: Encoded) -> list[dict[str, Any]]:
    """Each token with its text. The first of a document has no label, whatever its mask says."""
    shown: list[dict[str, Any]] = []
    open_ids: list[int] = []  # tokens of a character that is not whole yet
    for index, (token, is_trained) in enumerate(zip(document.ids, document.mask, strict=True)):
        open_ids.append(token)
        text = encoder.tokenizer.decode(open_ids, clean_up_tokenization_spaces=False)
        begins = shown[len(shown) - len(open_ids) + 1] if len(open_ids) > 1 else None
        entry = {"text": "" if begins else text, "id": token, "trained": bool(is_trained and index), "special": token in encoder.added_ids}
        shown.append(entry)
        (begins or entry)["text"] = text
        if not text.endswith("\ufffd") or len(open_ids) >= 4:
            open_ids = []
    return shown


def _plain(value: Any) -> Any:
    """A value as JSON can carry it to a page: no half characters, no endless texts."""
    if isinstance(value, str):
        return value[:_TEXT_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (int, float, bool, type(None))) else _plain(str(value))


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> int:
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    cancelled = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            asked = json.loads(line)
            if asked["do"] == "cancel":
                cancelled.set()
            else:
                requests.put(asked)
        os._exit(0)  # the page is gone

    threading.Thread(target=listen, daemon=True).start()
    browser: Browser | None = None
    while True:
        asked = requests.get()
        cancelled.clear()
        try:
            if asked["do"] == "open":
                tokenizer = Path(asked["tokenizer"]) if asked["tokenizer"] else None
                browser = Browser(RunConfig.from_dict(asked["config"]), tokenizer, Path(asked["cache"]))
            assert browser is not None
            match asked["do"]:
                case "open":
                    answer = browser.about()
                case "rows":
                    answer = browser.rows(asked["start"], asked["count"])
                case "tokens":
                    answer = browser.tokens(asked["row"])
                case "search":
                    answer = browser.search(asked["text"], max(1, asked["start"]), asked["limit"])
                case _:
                    answer = browser.statistics(cancelled)
            _say(answer=answer)
        except MegaTrainError as error:
            _say(error=error.message, hint=error.hint, nothing_trained=isinstance(error, NothingTrainedError))
        except RecursionError:
            _say(error="A row is nested too deeply to be shown.", hint="Correct the row.")


if __name__ == "__main__":
    hide_torch()
    sys.exit(main())
