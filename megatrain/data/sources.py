"""Where rows come from: a file, a folder of files, a data set on the hub, or the built-in demo.

A source gives its rows in an order that never changes, and a `version` that changes whenever they may.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from megatrain.config import DEMO, DataConfig
from megatrain.data.demo import DemoSource
from megatrain.data.files import (
    ARCHIVE_SUFFIX,
    DATA_SUFFIXES,
    TEXT_SUFFIXES,
    DataFile,
    Row,
    count_rows,
    data_files,
    is_archive,
    is_hidden,
    is_readable,
    read_file,
    suffix_of,
)
from megatrain.data.hub import HubSource
from megatrain.errors import DataError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_URL = re.compile(r"https?://[^/]+/datasets/([^?#]+?)(/(tree|blob|viewer)\b[^?#]*|/)?([?#].*)?")
_SPLITS = {"train", "test", "validation", "valid", "val", "dev", "eval"}
_FOLDER_RECORDS = {"dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json"}  # written by `datasets` beside the data


class Source(Protocol):
    """What every source offers. `total` is the number of rows, 0 when unknown; `notes` are for the reader of the report."""

    @property
    def name(self) -> str: ...
    @property
    def total(self) -> int: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    def version(self) -> str: ...
    def rows(self) -> Iterator[Row]: ...


@dataclass
class FileSource:
    """A file, the readable files of a folder in the order of their paths, or those inside a zip."""

    path: Path
    split: str
    skip_bad: bool = False
    notes: tuple[str, ...] = ()
    files: list[DataFile] = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.path.name
        self._at = -1  # the file that is being read
        if self.path.is_dir() or is_archive(self.path):
            self.files, self.notes = _chosen_files(self.path, self.split)
        elif is_readable(self.path):
            self.files = [DataFile(self.path, self.name)]
        else:
            raise DataError(f"{self.path.name} is of no kind that can be read.", f"Readable are {_kinds()}.")

    @property
    def total(self) -> int:
        counts = [count_rows(file) for file in self.files]
        return sum(counts) if all(counts) else 0

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def share_read(self) -> float:
        """How much of the files has been read, between 0 and 1, as far as it can be told."""
        read = sum(file.num_bytes for file in self.files[: max(self._at, 0)])
        here = self.files[self._at].bytes_read if 0 <= self._at < len(self.files) else 0
        return min(1.0, (read + here) / max(self.num_bytes, 1))

    def version(self) -> str:
        """Changes with the content or the names of the files, not with their times."""
        digest = hashlib.sha256()
        done: dict[Path, bytes] = {}
        for file in self.files:
            try:
                if file.path not in done:
                    with file.path.open("rb") as opened:
                        done[file.path] = hashlib.file_digest(opened, "sha256").digest()
            except OSError as error:
                raise DataError(f"{file.path} cannot be read: {error.strerror or error}.", "Check the file and its permissions.") from error
            digest.update(file.name.encode() + b"\0" + done[file.path])
        return digest.hexdigest()

    def rows(self) -> Iterator[Row]:
        for index, file in enumerate(self.files):
            self._at = index
            yield from read_file(file, self.skip_bad)
        self._at = len(self.files)


def open_source(config: DataConfig) -> Source:
    """The source that `config.path` names. DataError when there is none. Nothing is read or downloaded yet."""
    text = config.path.strip()
    if text == DEMO:
        return DemoSource()
    path = Path(text).expanduser()
    try:
        if path.exists():
            return FileSource(path, config.split, config.bad_lines == "skip")
    except (OSError, ValueError) as error:  # a name too long, a null byte
        raise DataError(f"`{text[:100]}` is no path: {error}.") from error
    url = _HUB_URL.fullmatch(text)
    name = url.group(1) if url else text
    if not _HUB_ID.fullmatch(name) or (not url and suffix_of(path) in (*DATA_SUFFIXES, *TEXT_SUFFIXES, ARCHIVE_SUFFIX)):
        raise DataError(f"There is no file or folder `{text}`.", "Give a path that exists, or a hub id such as owner/name.")
    return HubSource(name, config.subset, config.split, config.max_rows)


def _chosen_files(place: Path, split: str) -> tuple[list[DataFile], tuple[str, ...]]:
    """The files that are read: data files if there are any, else text files; those of other splits are left out."""
    found: list[DataFile] = []
    if place.is_dir():
        for path in sorted(place.rglob("*")):
            inside = PurePosixPath(path.relative_to(place).as_posix())
            if not is_hidden(inside) and path.is_file() and (is_readable(path) or is_archive(path)):
                found += data_files(path, inside.as_posix())
    else:
        found = data_files(place, place.name)
    data = [file for file in found if file.suffix in DATA_SUFFIXES and PurePosixPath(file.name).name not in _FOLDER_RECORDS]
    chosen = sorted(data or found, key=lambda file: file.name)
    if not chosen:
        kind = "folder" if place.is_dir() else "archive"
        raise DataError(f"The {kind} {place} holds no file that can be read.", f"Readable are {_kinds()}.")
    splits = {file.name: _SPLITS.intersection(re.split(r"[^a-z]+", file.name.lower())) for file in chosen}
    if data and any(split in names for names in splits.values()):
        left_out = [file.name for file in chosen if splits[file.name] and split not in splits[file.name]]
        if left_out:
            note = f"Left out, as they do not belong to the split `{split}`: {', '.join(left_out[:5])}{' …' if len(left_out) > 5 else ''}."
            return [file for file in chosen if file.name not in left_out], (note,)
    return chosen, ()


def _kinds() -> str:
    return ", ".join(suffix.lstrip(".") for suffix in DATA_SUFFIXES + TEXT_SUFFIXES) + " (also as .gz or in a .zip)"
