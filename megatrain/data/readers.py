"""Rows of each kind of file: JSON, JSON lines, tables, Parquet, Arrow and plain text, each read as a stream.

No reader holds more than one row (one row group of Parquet, one section of text) in memory. What happens to a line that
cannot be read is said in `files.py`.
"""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from megatrain.data.files import DataFile, Row
from megatrain.errors import DataError

SECTION_CHARACTERS = 16_384  # a text document longer than this is read in sections
_CHUNK = 1 << 20
_JSON_LINE_HINT = 'Every line must be one JSON object, for example {"prompt": "...", "completion": "..."}. ' \
                  "Or set data.bad_lines to skip."
_NOT_UTF8_HINT = "Save it as UTF-8; in Excel choose 'CSV UTF-8'."

Reader = Callable[[DataFile, bool], Iterator[Row]]


def reader_of(suffix: str) -> Reader:
    readers: dict[str, Reader] = {".json": _json, ".jsonl": _json_lines, ".ndjson": _json_lines, ".csv": _table, ".tsv": _table,
                                  ".parquet": _parquet, ".arrow": _arrow}  # fmt: skip
    return readers.get(suffix, _text)


def _lines(file: DataFile) -> Iterator[tuple[int, str, DataError | None]]:
    """(line number, line, what is wrong with it). Only a line feed ends a line: U+2028 and its like may stand inside JSON."""
    encoding = file.encoding()
    if encoding.startswith("utf-16"):
        with file.open_text(newline="\n") as text:
            number = 0
            try:
                for number, line in enumerate(text, 1):
                    yield number, line, None
            except UnicodeDecodeError as error:
                raise DataError(f"{file.name} is not UTF-16 text after line {number}: {error.reason}.", _NOT_UTF8_HINT) from error
        return
    with file.open() as binary:
        for number, raw in enumerate(binary, 1):
            try:
                line, problem = raw.decode(encoding if number == 1 else "utf-8"), None
            except UnicodeDecodeError as error:
                line = raw.decode("utf-8", "replace")
                problem = DataError(f"{file.name} line {number} is not UTF-8 text: {error.reason} at byte {error.start}.", _NOT_UTF8_HINT)
            yield number, line, problem


def _json_lines(file: DataFile, skip_bad: bool) -> Iterator[Row]:
    for number, line, problem in _lines(file):
        line = line.strip()
        if not line:
            continue
        place = f"{file.name} line {number}"
        if problem is None:
            try:
                yield _row(place, json.loads(line))
                continue
            except json.JSONDecodeError as error:
                if number == 1 and line.startswith("["):
                    raise DataError(f"{file.name} holds one JSON list, not JSON lines.", "Rename it to end in .json.") from error
                text = f"{place} is not JSON: {error.msg} at column {error.colno}: {_around(line, error.pos)}"
                problem = DataError(text, _JSON_LINE_HINT)
            except (ValueError, RecursionError) as error:
                problem = DataError(f"{place} {_unreadable(error)}", _JSON_LINE_HINT)
        if not skip_bad:
            raise problem
        yield Row(problem.message, {}, problem="the line cannot be read")


def _unreadable(error: Exception) -> str:
    return "is nested too deeply to be read." if isinstance(error, RecursionError) else f"holds a value that cannot be read: {error}."


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


def _json(file: DataFile, skip_bad: bool) -> Iterator[Row]:
    """Rows of a .json file: a list of rows, rows one after the other, or one object that holds a single list of rows."""
    values, name = _json_values(file), file.name
    first = next(values, None)
    if first is None:
        return
    line, value = first
    try:
        second = next(values, None)
    except DataError:
        yield _row(f"{name} line {line}", value)  # it is sound, whatever stands behind it
        raise
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


def _json_values(file: DataFile) -> Iterator[tuple[int, Any]]:
    """(line, value) of each element of a top-level list, or of each value of a file that holds several."""
    name = file.name
    with file.open_text() as text:
        window = _Window(text)
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
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name} line {window.line} {_unreadable(error)}", _JSON_LINE_HINT) from error
        else:
            window.move(end)
            return value


_DECODER = json.JSONDecoder()


def _broken(name: str, window: _Window, message: str, position: int) -> DataError:
    line = window.line + window.text.count("\n", window.at, position)
    return DataError(f"{name} line {line} is not JSON: {message}: {_around(window.text, position)}",
                     'A .json file holds a list of rows, for example [{"prompt": "...", "completion": "..."}].')  # fmt: skip


def _table(file: DataFile, skip_bad: bool) -> Iterator[Row]:
    """Rows of a table with a header. The separator is the most frequent of , ; | and tab in the header."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    name, line = file.name, 0
    with file.open_text(newline="") as text:
        try:
            header = text.readline()
            delimiter = max(",;\t|", key=header.count)
            names = next(csv.reader([header], delimiter=delimiter), [])
            columns = [column.strip() or f"column {number}" for number, column in enumerate(names, 1)]
            if len(set(columns)) < len(columns):
                raise DataError(f"{name} names a column twice in its first line: {_around(header.strip(), 0)}", "Rename one of them.")
            reader = csv.reader(text, delimiter=delimiter)
            while True:
                line = reader.line_num + 1
                try:
                    fields = next(reader, None)
                except csv.Error as error:
                    if not skip_bad:
                        raise
                    yield Row(f"{name} line {reader.line_num + 1}: {error}", {}, problem="the line cannot be read")
                    continue
                if fields is None:
                    return
                place = f"{name} line {reader.line_num + 1}"
                if len(fields) > len(columns):
                    yield Row(place, {}, problem=f"the line has {len(fields)} fields, the header {len(columns)}")
                elif fields:
                    yield Row(place, dict(zip(columns, fields, strict=False)))
        except csv.Error as error:
            raise DataError(f"{name} line {line + 1} is not a table: {error}.", "Put text that holds separators into quotes.") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{name} is not UTF-8 text after line {line}: {error.reason}.", _NOT_UTF8_HINT) from error


def _parquet(file: DataFile, skip_bad: bool) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    with file.whole() as source:
        try:
            with pyarrow.parquet.ParquetFile(source) as table:
                for row in _rows_of(table.iter_batches(batch_size=256), file.name):
                    yield row
                    number += 1
        except (pyarrow.ArrowException, ValueError, OverflowError) as error:
            raise _damaged(file, "Parquet", number, error) from error


def _arrow(file: DataFile, skip_bad: bool) -> Iterator[Row]:
    """Rows of an Arrow file as `datasets` saves it: the stream format, or the file format of other tools."""
    import pyarrow

    number = 0
    with file.whole() as whole:
        try:
            source = whole if file.is_compressed else pyarrow.memory_map(str(file.path))
            start = source.read(6)
            source.seek(0)
            if start == b"ARROW1":
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            else:
                batches = iter(pyarrow.ipc.open_stream(source))
            for row in _rows_of(batches, file.name):
                yield row
                number += 1
        except (pyarrow.ArrowException, ValueError, OverflowError) as error:
            raise _damaged(file, "Arrow", number, error) from error


def _damaged(file: DataFile, kind: str, rows_read: int, error: Exception) -> DataError:
    text = " ".join(str(error).split())[:200]
    return DataError(f"{file.name} is not a readable {kind} file after row {rows_read}: {text}.", "Get the file again.")


def _rows_of(batches: Any, name: str) -> Iterator[Row]:
    number = 0
    for batch in batches:
        batch.validate(full=True)  # offsets that point outside would crash the process
        for start in range(0, batch.num_rows, 256):
            for values in batch.slice(start, 256).to_pylist():
                number += 1
                yield Row(f"{name} row {number}", values)


def _text(file: DataFile, skip_bad: bool) -> Iterator[Row]:
    """A text file is one document; a long one comes in sections that end at a blank line, a line or a space."""
    name = file.name
    with file.open_text() as text:
        held, at, begins, ended, start = "", 0, True, False, 0  # `at`: where in `held` the next section begins
        while not ended:
            try:
                more = text.read(_CHUNK)
            except UnicodeDecodeError:
                yield Row(f"{name} character {start + 1}", {}, problem="the file is not UTF-8 text")
                return
            ended = not more
            held, at = held[at:] + more, 0
            while len(held) - at > (2 * SECTION_CHARACTERS if not ended else SECTION_CHARACTERS):
                cut = _section_end(held, at)
                yield Row(f"{name} character {start + 1}", {"text": held[at:cut]}, begins=begins, ends=False)
                start += cut - at
                at, begins = cut, False
        if held[at:].strip() or not begins:
            yield Row(f"{name} character {start + 1}", {"text": held[at:]}, begins=begins)


def _section_end(text: str, at: int) -> int:
    """Where a section from `at` of at most SECTION_CHARACTERS ends: behind a blank line, else a line, else a space."""
    for mark in ("\n\n", "\n", " "):
        found = text.rfind(mark, at + SECTION_CHARACTERS // 2, at + SECTION_CHARACTERS)
        if found >= 0:
            return found + len(mark) if mark != " " else found
    return at + SECTION_CHARACTERS
