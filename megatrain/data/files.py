"""Files -> rows: JSON, JSON lines, CSV, Parquet, Arrow and plain text, each read as a stream.

No reader holds more than one row (one row group of Parquet, one section of text) in memory. A file that cannot be
understood raises DataError with the line; a single row that cannot be used is a Row with its `problem`, so that it is
counted and shown instead of ending the run.
"""

import codecs
import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatrain.errors import DataError

DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")

SECTION_CHARACTERS = 16_384  # a text document longer than this is read in sections
_CHUNK = 1 << 20
_JSON_LINE_HINT = 'Every line must be one JSON object, for example {"prompt": "...", "completion": "..."}.'
_NOT_UTF8_HINT = "Save it as UTF-8; in Excel choose 'CSV UTF-8'."


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was found. `place` says where, e.g. `train.jsonl line 12`.

    A text document that is read in sections is several rows: `begins` and `ends` mark its first and last one.
    """

    place: str
    values: dict[str, Any]
    problem: str = ""
    begins: bool = True
    ends: bool = True


def suffix_of(path: Path) -> str:
    """The suffix that says how a file is read, without a final `.gz`."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def is_readable(path: Path) -> bool:
    return suffix_of(path) in DATA_SUFFIXES + TEXT_SUFFIXES


def read_file(path: Path, name: str) -> Iterator[Row]:
    """The rows of one file, in order. `name` stands for the file in messages. DataError when it cannot be read."""
    readers = {".json": _json, ".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _table, ".tsv": _table,
               ".parquet": _parquet, ".arrow": _arrow}  # fmt: skip
    reader = readers.get(suffix_of(path), _text)
    try:
        yield from reader(path, name)
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}.", "Check the file and its permissions.") from error
    except EOFError as error:
        raise DataError(f"{name} ends in the middle of its compressed data.", "Download it again.") from error


def count_rows(path: Path) -> int:
    """Rows that a file promises without being read, 0 when it does not say."""
    if suffix_of(path) != ".parquet":
        return 0
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    except pyarrow.ArrowException:
        return 0  # reading it will say what is wrong


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def _encoding(path: Path) -> str:
    with _open(path) as file:
        start = file.read(4)
    if start.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    return "utf-16" if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"


def _open_text(path: Path, newline: str | None = None) -> io.TextIOWrapper:
    return io.TextIOWrapper(_open(path), _encoding(path), newline=newline)


def _lines(path: Path, name: str) -> Iterator[tuple[int, str]]:
    """(line number, line) of a text file. Only a line feed ends a line: U+2028 and its like may stand inside JSON."""
    encoding = _encoding(path)
    if encoding == "utf-16":
        with _open_text(path) as text:
            yield from enumerate(text, 1)
        return
    with _open(path) as file:
        for number, raw in enumerate(file, 1):
            try:
                yield number, raw.decode(encoding if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{name} line {number} is not UTF-8 text: {error.reason} at byte {error.start}.", _NOT_UTF8_HINT) from error


def _json_lines(path: Path, name: str) -> Iterator[Row]:
    for number, line in _lines(path, name):
        line = line.strip()
        if not line:
            continue
        place = f"{name} line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            if number == 1 and line.startswith("["):
                raise DataError(f"{name} holds one JSON list, not JSON lines.", "Rename it to end in .json.") from error
            problem = f"{place} is not JSON: {error.msg} at column {error.colno}: {_around(line, error.pos)}"
            raise DataError(problem, _JSON_LINE_HINT) from error
        except RecursionError as error:
            raise DataError(f"{place} is nested too deeply to be read.", _JSON_LINE_HINT) from error
        yield _row(place, value)


def _around(text: str, position: int) -> str:
    """The offending text, short."""
    start, stop = max(0, position - 30), position + 30
    return ("…" if start else "") + text[start:stop].replace("\n", "⏎") + ("…" if stop < len(text) else "")


def _row(place: str, value: Any) -> Row:
    """A JSON value as a row: an object as it is, a string as text, a list of turns as messages."""
    if isinstance(value, dict):
        return Row(place, value)
    if isinstance(value, str):
        return Row(place, {"text": value})
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return Row(place, {"messages": value})
    return Row(place, {}, problem=f"the row is a JSON {_json_kind(value)}, not an object with columns")


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "boolean", int: "number", float: "number", list: "list"}.get(type(value), type(value).__name__)


def _json(path: Path, name: str) -> Iterator[Row]:
    """Rows of a .json file: a list of rows, rows one after the other, or one object that holds a single list of rows."""
    values = _json_values(path, name)
    first = next(values, None)
    if first is None:
        return
    second = next(values, None)
    line, value = first
    if second is None and isinstance(value, dict):
        tables = [(key, item) for key, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)]
        if len(tables) == 1 and tables[0][0] not in ("messages", "conversations", "conversation"):
            key, items = tables[0]
            yield from (_row(f"{name} `{key}` item {number}", item) for number, item in enumerate(items, 1))
            return
    yield _row(f"{name} line {line}", value)
    if second is not None:
        yield _row(f"{name} line {second[0]}", second[1])
    for line, value in values:
        yield _row(f"{name} line {line}", value)


class _Window:
    """A moving view of a text file: `text` from `at` on is not yet used, `line` is the line of `at`."""

    def __init__(self, file: Any) -> None:
        self.file, self.text, self.at, self.line, self.ended = file, "", 0, 1, False

    def grow(self) -> None:
        """Forget what is used and read as much again as is held, at least one chunk."""
        self.text = self.text[self.at :]
        self.at = 0
        more = self.file.read(max(_CHUNK, len(self.text)))
        self.ended = not more
        self.text += more

    def move(self, position: int) -> None:
        self.line += self.text.count("\n", self.at, position)
        self.at = position

    def next_character(self) -> str:
        """The next character that is not white space, not taken; empty at the end of the file."""
        while True:
            found = _NOT_SPACE.search(self.text, self.at)
            if found:
                self.move(found.start())
                return found.group()
            self.move(len(self.text))
            if self.ended:
                return ""
            self.grow()


_NOT_SPACE = re.compile(r"\S")


def _json_values(path: Path, name: str) -> Iterator[tuple[int, Any]]:
    """(line, value) of each element of a top-level list, or of each value of a file that holds several."""
    with _open_text(path) as file:
        window = _Window(file)
        try:
            in_list = window.next_character() == "["
            if in_list:
                window.move(window.at + 1)
            first = True
            while True:
                character = window.next_character()
                if in_list and character == "]":
                    return
                if not character:
                    if in_list:
                        raise DataError(f"{name} ends inside its list, at line {window.line}.", "The file is cut off; get it again.")
                    return
                if in_list and not first:
                    if character != ",":
                        raise _broken(name, window, "Expecting ',' between two rows", window.at)
                    window.move(window.at + 1)
                    window.next_character()
                yield window.line, _decode_value(window, name)
                first = False
        except UnicodeDecodeError as error:
            raise DataError(f"{name} is not UTF-8 text after line {window.line}: {error.reason}.", _NOT_UTF8_HINT) from error


def _decode_value(window: _Window, name: str) -> Any:
    """The value at the window, which is read on until the value is complete."""
    while True:
        try:
            value, end = _DECODER.raw_decode(window.text, window.at)
        except json.JSONDecodeError as error:
            # An incomplete value fails at the end of what is held, or at the start of its last string.
            incomplete = error.msg.startswith("Unterminated string") or error.pos > len(window.text) - 16
            if window.ended or not incomplete:
                raise _broken(name, window, error.msg, error.pos) from error
            window.grow()
        except RecursionError as error:
            raise DataError(f"{name} line {window.line} is nested too deeply to be read.", _JSON_LINE_HINT) from error
        else:
            window.move(end)
            return value


_DECODER = json.JSONDecoder()


def _broken(name: str, window: _Window, message: str, position: int) -> DataError:
    line = window.line + window.text.count("\n", window.at, position)
    return DataError(f"{name} line {line} is not JSON: {message}: {_around(window.text, position)}",
                     'A .json file holds a list of rows, for example [{"prompt": "...", "completion": "..."}].')  # fmt: skip


def _table(path: Path, name: str) -> Iterator[Row]:
    """Rows of a table with a header. The separator is the most frequent of , ; | and tab in the header."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with _open_text(path, newline="") as file:
        line = 0
        try:
            header = file.readline()
            delimiter = max(",;\t|", key=header.count)
            names = next(csv.reader([header], delimiter=delimiter), [])
            columns = [column.strip() or f"column {number}" for number, column in enumerate(names, 1)]
            if len(set(columns)) < len(columns):
                raise DataError(f"{name} names a column twice in its first line: {_around(header.strip(), 0)}", "Rename one of them.")
            reader = csv.reader(file, delimiter=delimiter)
            for fields in reader:
                line, place = reader.line_num + 1, f"{name} line {reader.line_num + 1}"
                if not fields:
                    continue
                if len(fields) > len(columns):
                    yield Row(place, {}, problem=f"the line has {len(fields)} fields, the header {len(columns)}")
                else:
                    yield Row(place, dict(zip(columns, fields, strict=False)))
        except csv.Error as error:
            raise DataError(f"{name} line {line + 1} is not a table: {error}.", "Put text that holds separators into quotes.") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{name} is not UTF-8 text after line {line}: {error.reason}.", _NOT_UTF8_HINT) from error


def _parquet(path: Path, name: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from _batches(file.iter_batches(batch_size=256), name)
    except pyarrow.ArrowException as error:
        raise DataError(f"{name} is not a readable Parquet file: {error}.", "Get the file again.") from error


def _arrow(path: Path, name: str) -> Iterator[Row]:
    """Rows of an Arrow file as `datasets` saves it: the stream format, or the file format of other tools."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source:
            if source.read(6) == b"ARROW1":
                reader = pyarrow.ipc.open_file(source)
                yield from _batches((reader.get_batch(index) for index in range(reader.num_record_batches)), name)
            else:
                source.seek(0)
                yield from _batches(pyarrow.ipc.open_stream(source), name)
    except pyarrow.ArrowException as error:
        raise DataError(f"{name} is not a readable Arrow file: {error}.", "Get the file again.") from error


def _batches(batches: Any, name: str) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, 256):
            for values in batch.slice(start, 256).to_pylist():
                number += 1
                yield Row(f"{name} row {number}", values)


def _text(path: Path, name: str) -> Iterator[Row]:
    """A text file is one document; a long one comes in sections that end at a blank line, a line or a space."""
    with _open_text(path) as file:
        held, begins, ended, start = "", True, False, 0
        while not ended:
            try:
                more = file.read(_CHUNK)
            except UnicodeDecodeError:
                yield Row(f"{name} character {start + 1}", {}, problem="the file is not UTF-8 text")
                return
            ended = not more
            held += more
            while len(held) > (2 * SECTION_CHARACTERS if not ended else SECTION_CHARACTERS):
                cut = _section_end(held)
                yield Row(f"{name} character {start + 1}", {"text": held[:cut]}, begins=begins, ends=False)
                held, begins, start = held[cut:], False, start + cut
        if held.strip() or not begins:
            yield Row(f"{name} character {start + 1}", {"text": held}, begins=begins)


def _section_end(text: str) -> int:
    """Where a section of at most SECTION_CHARACTERS ends: behind a blank line, else a line, else a space."""
    for mark in ("\n\n", "\n", " "):
        found = text.rfind(mark, SECTION_CHARACTERS // 2, SECTION_CHARACTERS)
        if found >= 0:
            return found + len(mark) if mark != " " else found
    return SECTION_CHARACTERS
