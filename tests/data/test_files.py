"""Every kind of file, also as people's programs really write them."""

import codecs
import gzip
import json
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatrain.config import DataConfig
from megatrain.data.files import Row
from megatrain.data.readers import SECTION_CHARACTERS
from megatrain.data.sources import open_source
from megatrain.errors import DataError

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "ä\u2028ö", "completion": 'x,"y"\n;z'}]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)


def read(path: Path, **settings) -> list[Row]:
    return list(open_source(DataConfig(path=str(path), **settings)).rows())


def values(path: Path, **settings) -> list[dict]:
    return [row.values for row in read(path, **settings)]


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


JSONL = {
    "plain": LINES, "final line feed": LINES + "\n", "BOM": b"\xef\xbb\xbf" + LINES.encode(), "CRLF": LINES.replace("\n", "\r\n"),
    "empty lines": "\n\n" + LINES.replace("\n", "\n \n\t\n") + "\n\n", "UTF-16": codecs.BOM_UTF16_LE + LINES.encode("utf-16-le"),
}  # fmt: skip


@pytest.mark.parametrize("name", JSONL)
def test_json_lines(tmp_path: Path, name: str) -> None:
    assert values(written(tmp_path / "a.jsonl", JSONL[name])) == ROWS


JSON = {
    "list": json.dumps(ROWS),
    "indented": json.dumps(ROWS, indent=2),
    "BOM": b"\xef\xbb\xbf" + json.dumps(ROWS, ensure_ascii=False).encode(),
    "lines in .json": LINES,
    "one after the other": " ".join(map(json.dumps, ROWS)),
    "in an object": json.dumps({"version": 1, "data": ROWS}),
}


@pytest.mark.parametrize("name", JSON)
def test_json(tmp_path: Path, name: str) -> None:
    assert values(written(tmp_path / "a.json", JSON[name])) == ROWS


def test_a_json_value_may_be_longer_than_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.data.readers._CHUNK", 7)
    rows = [{"text": "\\ud83d\\ude00 \U0001f600 [{" * size, "n": -1.5e3, "deep": [[{}], None, True]} for size in (1, 50, 3)]
    for ascii_only in (True, False):
        assert values(written(tmp_path / "a.json", json.dumps(rows, ensure_ascii=ascii_only, indent=1))) == rows


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv(tmp_path: Path, delimiter: str) -> None:
    quoted = [[cell.replace('"', '""') for cell in row.values()] for row in ROWS]
    lines = [delimiter.join(["", "prompt", "completion"]), *(delimiter.join(["7", *(f'"{cell}"' for cell in row)]) for row in quoted)]
    path = written(tmp_path / "a.csv", b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert values(path) == [{"column 1": "7", **row} for row in ROWS]


def test_csv_rows_that_do_not_fit_the_header(tmp_path: Path) -> None:
    rows = read(written(tmp_path / "a.csv", "prompt,completion\na,b\na\na,b,c\n\n"))
    assert [row.values for row in rows[:2]] == [{"prompt": "a", "completion": "b"}, {"prompt": "a"}]
    assert (rows[2].place, rows[2].problem) == ("a.csv line 4", "the line has 3 fields, the header 2")


def test_parquet_arrow_and_compressed(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for name, new in (("a.arrow", pyarrow.ipc.new_stream), ("b.arrow", pyarrow.ipc.new_file)):
        with pyarrow.OSFile(str(tmp_path / name), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)
    written(tmp_path / "a.jsonl.gz", gzip.compress(LINES.encode()))
    for name in ("a.parquet", "a.arrow", "b.arrow", "a.jsonl.gz"):
        assert values(tmp_path / name) == ROWS
    assert open_source(DataConfig(path=str(tmp_path / "a.parquet"))).total == 2


BROKEN = {
    "a.jsonl": (LINES + '\n{"prompt": "a" "completion"}', "a.jsonl line 3 is not JSON: Expecting ',' delimiter at column 16"),
    "b.jsonl": ("[\n" + LINES, "b.jsonl holds one JSON list, not JSON lines. Rename it to end in .json."),
    "c.jsonl": (LINES.encode() + b'\n{"text": "caf\xe9"}', "c.jsonl line 3 is not UTF-8"),
    "d.jsonl": ("[" * 100_000, "d.jsonl"),
    "a.json": ("[\n" + json.dumps(ROWS[0]) + ",\n{'a': 1}]", "a.json line 3 is not JSON: Expecting property name"),
    "b.json": (json.dumps(ROWS)[:-1], "b.json ends inside its list"),
    "c.json": ("[" + LINES + "]", "c.json line 2 is not JSON: Expecting ',' between two rows"),
    "d.json": (json.dumps(ROWS)[:-10], "d.json line 1 is not JSON: Unterminated string"),
    "e.json": (b'[{"text": "caf\xe9"}]', "e.json is not UTF-8"),
    "a.csv": ("prompt,prompt\na,b\n", "a.csv names a column twice"),
    "b.csv": (b"text\ncaf\xe9\n", "b.csv is not UTF-8 text"),
    "a.parquet": (b"PAR1 no parquet", "a.parquet is not a readable Parquet file"),
    "a.arrow": (b"no arrow", "a.arrow is not a readable Arrow file"),
    "a.jsonl.gz": (gzip.compress(LINES.encode())[:-20], "a.jsonl.gz ends in the middle"),
    "b.jsonl.gz": (LINES, "b.jsonl.gz is damaged"),
    "a.pickle": (b"\x80", "a.pickle is of no kind that can be read. Readable are json,"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_understood_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    content, message = BROKEN[name]
    path = written(tmp_path / name, content)
    with pytest.raises(DataError) as error:
        read(path)
    assert message in str(error.value)


def test_rows_that_are_no_objects(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}]
    rows = read(written(tmp_path / "a.jsonl", f'"words"\n{json.dumps(turns)}\n3\nnull\n[]'))
    assert [row.values for row in rows] == [{"text": "words"}, {"messages": turns}, {}, {}, {}]
    kinds = ("number", "null", "list")
    assert [row.problem for row in rows[2:]] == [f"the row is a JSON {kind}, not an object with columns" for kind in kinds]


def test_a_text_file_is_one_document_and_a_long_one_comes_in_sections(tmp_path: Path) -> None:
    text = "".join(f"Line {number}, with some words.\n" + ("\n" if number % 9 == 0 else "") for number in range(4000))
    (row,) = read(written(tmp_path / "short.txt", "a\r\nb\n"))
    assert (row.values, row.begins, row.ends) == ({"text": "a\nb\n"}, True, True)
    sections = read(written(tmp_path / "long.txt", text))
    assert "".join(row.values["text"] for row in sections) == text
    assert all(len(row.values["text"]) <= SECTION_CHARACTERS for row in sections)
    assert all(row.values["text"].endswith("\n\n") for row in sections[:-1])
    assert [row.begins for row in sections] == [True] + [False] * (len(sections) - 1)
    assert [row.ends for row in sections] == [False] * (len(sections) - 1) + [True]


def test_a_text_without_any_space_is_cut_where_it_must_be(tmp_path: Path) -> None:
    sections = read(written(tmp_path / "a.txt", "語" * (2 * SECTION_CHARACTERS + 5)))
    assert [len(row.values["text"]) for row in sections] == [SECTION_CHARACTERS, SECTION_CHARACTERS, 5]


def test_a_folder_of_texts_skips_what_is_empty_and_shows_what_is_no_text(tmp_path: Path) -> None:
    files = {"b.txt": "B", "a/c.md": "C", "empty.txt": " \n", ".hidden.txt": "H", "z.txt": b"\xff\xfe\xfd", "x.bin": b"\0"}
    for name, content in files.items():
        written(tmp_path / name, content)
    rows = read(tmp_path)
    assert [row.values.get("text") for row in rows] == ["C", "B", None]
    assert rows[-1].problem


def test_a_folder_of_data_reads_the_data_and_only_its_split(tmp_path: Path) -> None:
    for name in ("data/train-2.jsonl", "data/train-1.jsonl", "data/test-1.jsonl", "extra.jsonl"):
        written(tmp_path / name, json.dumps({"text": name}))
    written(tmp_path / "README.md", "# Words about the data")
    written(tmp_path / "dataset_info.json", '{"features": {}}')
    source = open_source(DataConfig(path=str(tmp_path)))
    assert [row.values["text"] for row in source.rows()] == ["data/train-1.jsonl", "data/train-2.jsonl", "extra.jsonl"]
    assert source.notes == ("Left out, as they do not belong to the split `train`: data/test-1.jsonl.",)
    assert [row["text"] for row in values(tmp_path, split="test")] == ["data/test-1.jsonl", "extra.jsonl"]


def test_the_version_follows_content_and_names_and_not_times(tmp_path: Path) -> None:
    def version() -> str:
        return open_source(DataConfig(path=str(tmp_path))).version()

    written(tmp_path / "a.jsonl", LINES)
    first = version()
    written(tmp_path / "a.jsonl", LINES)
    assert version() == first
    written(tmp_path / "a.jsonl", LINES + "\n")
    assert version() != first
    (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
    assert version() != first


@pytest.mark.parametrize("path", ["/no/such/file.jsonl", "file.csv", "no such name", "../up/and/away", "a" * 5000, "nul\0byte"])
def test_a_path_that_is_not_there(path: str) -> None:
    with pytest.raises(DataError):
        open_source(DataConfig(path=path))


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no file that can be read"):
        open_source(DataConfig(path=str(tmp_path)))


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_a_zip_is_read_like_a_folder(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["p"], "completion": ["c"]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    members = {"data/b.jsonl": LINES.encode(), "data/a.csv.gz": gzip.compress(b"prompt,completion\nx,y\n"), "README.md": b"words",
               "__MACOSX/data/._b.jsonl": b"junk", "c.parquet": (tmp_path / "t.parquet").read_bytes()}  # fmt: skip
    rows = read(zipped(tmp_path / "all.zip", members))
    assert [row.values for row in rows] == [{"prompt": "p", "completion": "c"}, {"prompt": "x", "completion": "y"}, *ROWS]
    assert rows[1].place == "all.zip/data/a.csv.gz line 2"
    folder = tmp_path / "folder"
    folder.mkdir()
    zipped(folder / "one.zip", {"a.jsonl": LINES.encode()})
    written(folder / "z.jsonl", LINES)
    assert values(folder) == ROWS * 2


def test_a_column_file_may_be_compressed(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a", "b"]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    written(tmp_path / "a.parquet.gz", gzip.compress((tmp_path / "t.parquet").read_bytes()))
    assert values(tmp_path / "a.parquet.gz") == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize("content", [b"PK\x03\x04 damaged", b"", b"no zip"])
def test_a_damaged_zip_is_named(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match="a.zip is damaged"):
        read(written(tmp_path / "a.zip", content))
    zipped(tmp_path / "b.zip", {"picture.png": b"x"})
    with pytest.raises(DataError, match="holds no file that can be read"):
        read(tmp_path / "b.zip")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_without_a_mark(tmp_path: Path, encoding: str) -> None:
    assert values(written(tmp_path / "a.jsonl", LINES.encode(encoding))) == ROWS
    assert values(written(tmp_path / "a.csv", "prompt,completion\r\nä,b\r\n".encode(encoding))) == [{"prompt": "ä", "completion": "b"}]


SKIPPED = {
    "a.jsonl": (b'{"text": "a"}\nnot JSON\n{"text": "b"}\n\xff\xfe"\n{"text": "c"}\n', "abc",
                ["a.jsonl line 2 is not JSON: Expecting value", "a.jsonl line 4 is not UTF-8 text"]),
    "huge.jsonl": (b'{"text": ' + b"1" * 5000 + b'}\n{"text": "b"}', "b", ["huge.jsonl line 1 holds a value that cannot be read"]),
    "a.json": (b'[{"text": "a"},\n{"text" "b"},\n{"text": "c"}]', "a", ["a.json line 2 is not JSON"]),
    "a.csv": (b'text,n\na,1\nb,2\n"\x80",3\nc,4\n', "", ["a.csv is not UTF-8 text after line 0"]),
    "a.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 5000)[:-8], "a" * 5000, ["a.jsonl.gz ends in the middle"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SKIPPED)
def test_lines_that_cannot_be_read_are_skipped_by_choice_and_fatal_otherwise(tmp_path: Path, name: str) -> None:
    content, good, problems = SKIPPED[name]
    path = written(tmp_path / name, content)
    rows = read(path, bad_lines="skip")
    assert "".join(row.values["text"] for row in rows if not row.problem) == good
    bad = [row for row in rows if row.problem]
    assert len(bad) == len(problems)
    assert all(row.place.startswith(problem) for row, problem in zip(bad, problems, strict=True))
    with pytest.raises(DataError) as error:
        read(path)
    assert error.value.message.startswith(problems[0])
