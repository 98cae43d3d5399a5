"""Where rows come from: a file, a folder of files, a data set on the hub, or the built-in demo.

A source gives its rows in an order that never changes, and a `version` that changes whenever they may.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megatrain.config import DEMO, DataConfig
from megatrain.data.demo import DemoSource
from megatrain.data.files import DATA_SUFFIXES, TEXT_SUFFIXES, Row, count_rows, is_readable, read_file, suffix_of
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
    """A file, or the readable files of a folder in the order of their paths."""

    path: Path
    split: str
    notes: tuple[str, ...] = ()
    files: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.path.name
        if self.path.is_dir():
            self.files, self.notes = _folder_files(self.path, self.split)
        elif is_readable(self.path):
            self.files = [self.path]
        else:
            raise DataError(f"{self.path.name} is of no kind that can be read.", f"Readable are {_kinds()}.")

    @property
    def total(self) -> int:
        counts = [count_rows(path) for path in self.files]
        return sum(counts) if all(counts) else 0

    def _name_of(self, path: Path) -> str:
        return path.name if path == self.path else path.relative_to(self.path).as_posix()

    def version(self) -> str:
        """Changes with the content or the names of the files, not with their times."""
        digest = hashlib.sha256()
        for path in self.files:
            try:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").digest()
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror or error}.", "Check the file and its permissions.") from error
            digest.update(self._name_of(path).encode() + b"\0" + content)
        return digest.hexdigest()

    def rows(self) -> Iterator[Row]:
        for path in self.files:
            yield from read_file(path, self._name_of(path))


def open_source(config: DataConfig) -> Source:
    """The source that `config.path` names. DataError when there is none. Nothing is read or downloaded yet."""
    text = config.path.strip()
    if text == DEMO:
        return DemoSource()
    path = Path(text).expanduser()
    try:
        if path.exists():
            return FileSource(path, config.split)
    except (OSError, ValueError) as error:  # a name too long, a null byte
        raise DataError(f"`{text[:100]}` is no path: {error}.") from error
    url = _HUB_URL.fullmatch(text)
    name = url.group(1) if url else text
    if not _HUB_ID.fullmatch(name) or (not url and suffix_of(path) in DATA_SUFFIXES + TEXT_SUFFIXES):
        raise DataError(f"There is no file or folder `{text}`.", "Give a path that exists, or a hub id such as owner/name.")
    return HubSource(name, config.subset, config.split, config.max_rows)


def _folder_files(folder: Path, split: str) -> tuple[list[Path], tuple[str, ...]]:
    """The files that are read: data files if there are any, else text files; those of other splits are left out."""
    found = []
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if not any(part.startswith((".", "__MACOSX")) for part in parts) and path.is_file() and is_readable(path):
            found.append(path)
    data = [path for path in found if suffix_of(path) in DATA_SUFFIXES and path.name not in _FOLDER_RECORDS]
    chosen = sorted(data or found, key=lambda path: path.relative_to(folder).as_posix())
    if not chosen:
        raise DataError(f"The folder {folder} holds no file that can be read.", f"Readable are {_kinds()}.")
    splits = {path: _SPLITS.intersection(re.split(r"[^a-z]+", path.relative_to(folder).as_posix().lower())) for path in chosen}
    if data and any(split in names for names in splits.values()):
        left_out = [path for path in chosen if splits[path] and split not in splits[path]]
        if left_out:
            names = ", ".join(path.relative_to(folder).as_posix() for path in left_out[:5])
            note = f"Left out, as they do not belong to the split `{split}`: {names}{' …' if len(left_out) > 5 else ''}."
            return [path for path in chosen if path not in set(left_out)], (note,)
    return chosen, ()


def _kinds() -> str:
    return ", ".join(suffix.lstrip(".") for suffix in DATA_SUFFIXES + TEXT_SUFFIXES) + " (also .gz)"
