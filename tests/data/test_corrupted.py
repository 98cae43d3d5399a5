"""Ten thousand damaged files: each is an error that says where, or gives rows of which every bad one is counted."""

import gzip
import io
import json
import random
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatrain.config import DataConfig
from megatrain.data.files import Row
from megatrain.data.formats import BadRow, Conversation, Example, Pair, Text, read_row
from megatrain.data.sources import open_source
from megatrain.errors import DataError

ROWS = [{"prompt": f"question {n} ä\n", "completion": f'answer "{n}", ja'} for n in range(6)]
PER_KIND = 1000
PLACES = ("line", "row", "item", "character", "ends in the middle", "is damaged", "names a column twice", "holds no file",
          "cannot be unpacked", "one JSON list", "cannot be read")  # fmt: skip


def jsonl() -> bytes:
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()


def table() -> bytes:
    return ("prompt,completion\r\n" + "".join(f'"question {n}\nmore","answer ""{n}"""\r\n' for n in range(6))).encode()


def columns(write) -> bytes:
    sink = io.BytesIO()
    write(pyarrow.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


def arrow(rows: pyarrow.Table, sink: io.BytesIO) -> None:
    with pyarrow.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)


def zipped() -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jsonl", jsonl())
        archive.writestr("b.csv", table())
    return sink.getvalue()


KINDS = {
    "a.jsonl": jsonl, "a.json": lambda: json.dumps(ROWS, indent=1).encode(), "a.csv": table, "a.tsv": lambda: table().replace(b",", b"\t"),
    "a.parquet": lambda: columns(pyarrow.parquet.write_table), "a.arrow": lambda: columns(arrow),
    "a.jsonl.gz": lambda: gzip.compress(jsonl()), "a.zip": zipped,
    "a.txt": lambda: b"some words\n" * 40, "utf16.jsonl": lambda: jsonl().decode().encode("utf-16"),
}  # fmt: skip
FAULTS = ("cut", "flip", "zeros", "repeat", "insert", "swap")


def damaged(content: bytes, chance: random.Random) -> bytes:
    """One or two faults, as disks, transfers and people make them."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2))):
        at, size = chance.randrange(len(data) + 1), chance.randrange(1, 12)
        match chance.choice(FAULTS):
            case "cut":
                del data[at:]
            case "flip" if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case "zeros":
                data[at : at + size] = bytes(min(size, len(data) - at))
            case "repeat":
                data[at:at] = data[at : at + size]
            case "insert":
                data[at:at] = chance.choice((b"\xff", b'"', b"\n", b"{", b"]", b"\x00", b",", b"\r", b"\xef\xbb\xbf", b"NaN", b"[" * 30))
            case _:
                del data[at : at + size]
    return bytes(data)


@pytest.mark.parametrize("name", KINDS)
def test_no_damage_is_a_crash_or_an_empty_row(tmp_path: Path, name: str) -> None:
    content, chance = KINDS[name](), random.Random(name)
    path = tmp_path / name
    num_read = 0
    for number in range(PER_KIND):
        path.write_bytes(damaged(content, chance))
        skip = number % 2 == 0
        found = read(path, skip)
        if isinstance(found, DataError):
            assert any(place in found.message for place in PLACES), found.message
            assert found.hint
            assert not skip or path.suffix == ".zip", found.message  # a zip whose list of files is damaged cannot be opened at all
            continue
        num_read += 1
        for row in found:
            check(row)
    assert num_read > PER_KIND / 20


def read(path: Path, skip: bool) -> list[Row] | DataError:
    try:
        return list(open_source(DataConfig(path=str(path), bad_lines="skip" if skip else "stop")).rows())
    except DataError as error:
        return error


def understood(row: Row) -> Example | BadRow:
    try:
        return read_row(row, "text" if "text" in row.values else "prompt_completion")
    except BadRow as reason:
        return reason


def check(row: Row) -> None:
    assert row.place
    if row.problem:
        return
    match understood(row):
        case BadRow() as reason:
            assert str(reason)
        case Pair(prompt=prompt, completion=completion):
            assert prompt.strip()
            assert completion.strip()
        case Text(text=words):
            assert words.strip() or not (row.begins and row.ends)
        case Conversation(messages=messages):
            assert any(message["role"] == "assistant" for message in messages)
