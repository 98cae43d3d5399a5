"""Files as they come: plain, gzipped, or members of a zip; and the rows of any of them, read as a stream.

A file that cannot be understood raises DataError with the line. With `skip_bad` it gives the rows that can be read,
and one Row with its `problem` for each line that cannot, or for the rest of a file that cannot be followed any further.
A row that is readable and of no use is a Row with a `problem` in either case: it is counted and shown.
"""

import codecs
import gzip
import io
import lzma
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from megatrain.errors import DataError

DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
COLUMN_SUFFIXES = (".parquet", ".arrow")  # read by position, not from front to back
ARCHIVE_SUFFIX = ".zip"

_JUNK = (".", "__MACOSX")


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


@dataclass
class DataFile:
    """One file with rows, or one member of a zip. `name` stands for it in messages."""

    path: Path
    name: str
    member: str = ""
    _raw: IO[bytes] | None = field(default=None, repr=False)

    @property
    def suffix(self) -> str:
        return suffix_of(PurePosixPath(self.member) if self.member else self.path)

    @property
    def is_compressed(self) -> bool:
        return bool(self.member) or self.path.name.lower().endswith(".gz")

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, compressed if they are."""
        if self.member:
            with _opened_zip(self.path) as archive:
                return archive.getinfo(self.member).compress_size
        return self.path.stat().st_size

    @property
    def bytes_read(self) -> int:
        """How far the reading has come, in bytes on disk; 0 where nobody knows."""
        return self._raw.tell() if self._raw is not None and not self._raw.closed else 0

    def open(self) -> IO[bytes]:
        """The content, decompressed as it is read."""
        if self.member:
            with _opened_zip(self.path) as archive:  # the open member keeps the file open
                found: IO[bytes] = archive.open(self.member)
        else:
            found = self._raw = self.path.open("rb")
        is_gzip = (self.member or self.path.name).lower().endswith(".gz")
        return _Gzip(fileobj=found) if is_gzip else found  # type: ignore[return-value]

    def open_text(self, newline: str | None = None) -> io.TextIOWrapper:
        return io.TextIOWrapper(self.open(), self.encoding(), newline=newline)

    def encoding(self) -> str:
        """By the mark at the beginning; without one UTF-16 shows by its zero bytes, and the rest should be UTF-8."""
        with self.open() as file:
            start = file.read(4)
        if start.startswith(codecs.BOM_UTF8):
            return "utf-8-sig"
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        if len(start) == 4 and start[1] == start[3] == 0 != start[0]:
            return "utf-16-le"
        return "utf-16-be" if len(start) == 4 and start[0] == start[2] == 0 != start[1] else "utf-8"

    def whole(self) -> IO[bytes]:
        """The content in a file that can be read by position; a compressed one is unpacked to a temporary file on disk."""
        if not self.is_compressed:
            return self.path.open("rb")
        copy = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        with self.open() as file:
            shutil.copyfileobj(file, copy, 1 << 20)
        copy.seek(0)
        return copy


class _Gzip(gzip.GzipFile):
    """A gzip stream that closes the file beneath it."""

    def close(self) -> None:
        beneath: Any = self.fileobj
        super().close()
        if beneath is not None:
            beneath.close()


def suffix_of(path: Path | PurePosixPath) -> str:
    """The suffix that says how a file is read, without a final `.gz`."""
    name = path.name.lower().removesuffix(".gz")
    return PurePosixPath(name).suffix


def is_readable(path: Path | PurePosixPath) -> bool:
    return suffix_of(path) in DATA_SUFFIXES + TEXT_SUFFIXES


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(ARCHIVE_SUFFIX)


def is_hidden(path: PurePosixPath) -> bool:
    """Whether a file inside a folder or zip is none of the user's: hidden, or a helper of the Finder."""
    return any(part.startswith(_JUNK) for part in path.parts)


def data_files(path: Path, name: str) -> list[DataFile]:
    """The file itself, or the readable members of a zip. DataError for a zip that cannot be opened."""
    if not is_archive(path):
        return [DataFile(path, name)]
    with _explained(name):
        with _opened_zip(path) as archive:
            members = [name for name in archive.namelist() if name and not name.endswith("/")]
        usable = [member for member in members if is_readable(PurePosixPath(member)) and not is_hidden(PurePosixPath(member))]
        return [DataFile(path, f"{name}/{member}", member) for member in usable]


@contextmanager
def _opened_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive. What a damaged list of its files raises, which is whatever the bytes happen to mean, is a BadZipFile."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (ValueError, LookupError, OverflowError, struct.error) as error:
        raise zipfile.BadZipFile(str(error)) from error


def read_file(file: DataFile, skip_bad: bool = False) -> Iterator[Row]:
    """The rows of one file, in order. DataError when it cannot be read, unless `skip_bad`."""
    from megatrain.data import readers

    try:
        with _explained(file.name):
            yield from readers.reader_of(file.suffix)(file, skip_bad)
    except DataError as error:
        if not skip_bad:
            raise
        yield Row(error.message, {}, problem="the rest of the file cannot be read")


def count_rows(file: DataFile) -> int:
    """Rows that a file promises without being read, 0 when it does not say."""
    if file.suffix != ".parquet" or file.is_compressed:
        return 0
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(file.path).num_rows)
    except (pyarrow.ArrowException, OSError):
        return 0  # reading it will say what is wrong


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turns what the system and decompression raise into DataError."""
    try:
        yield
    except EOFError as error:
        raise DataError(f"{name} ends in the middle of its compressed data.", "Download it again.") from error
    except (zlib.error, lzma.LZMAError, zipfile.BadZipFile, gzip.BadGzipFile) as error:
        raise DataError(f"{name} is damaged: its compressed data cannot be unpacked ({error}).", "Download it again.") from error
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}.", "Check the file and its permissions.") from error
    except (NotImplementedError, RuntimeError) as error:  # of zipfile: an unknown compression, a password
        raise DataError(f"{name} cannot be unpacked: {error}.", "Unpack it by hand and give the folder.") from error
