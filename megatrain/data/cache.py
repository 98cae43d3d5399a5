"""Tokenised documents on disk: written once as a stream, then memory-mapped.

A cache folder holds ids.bin (uint32), mask.bin (bool), offsets.bin (int64, N + 1), rows.bin (int64, the row that each
document comes from) and meta.json, which is written last and carries the size and checksum of the others. A folder is
built under a temporary name and renamed, so one that is there is complete; one that fails its checksums is not used.
"""

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.errors import DataError

LAYOUT = 1
_TYPES = {"ids": np.uint32, "mask": np.bool_, "offsets": np.int64, "rows": np.int64}
_STALE_S = 3600.0  # a build writes every few seconds; one that has not for this long has died


@dataclass(frozen=True)
class TokenCache:
    """N documents. ids: [tokens] uint32, mask: [tokens] bool, offsets: [N + 1] int64, rows: [N] int64; read-only maps."""

    folder: Path
    ids: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    details: dict[str, Any]
    checksum: str  # of ids, mask and offsets together

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


def open_cache(folder: Path) -> TokenCache | None:
    """The cache in `folder`, with every checksum verified; None when it is missing, incomplete or damaged."""
    try:
        meta = json.loads((folder / "meta.json").read_text("utf-8"))
        if meta["layout"] != LAYOUT:
            return None
        for name in _TYPES:
            with (folder / f"{name}.bin").open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != meta["files"][name]["sha256"]:
                    return None
        arrays = {name: _mapped(folder / f"{name}.bin", kind) for name, kind in _TYPES.items()}
        return TokenCache(folder, details=meta["details"], checksum=meta["checksum"], **arrays)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mapped(path: Path, kind: Any) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.zeros(0, kind)
    return np.memmap(path, kind, mode="r")


class CacheWriter:
    """Collects documents into a folder that appears under its name only when `finish` is called.

    Leaving the `with` block without `finish` removes everything that was written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokens, self._documents = 0, 0

    def __enter__(self) -> "CacheWriter":
        parent = self.folder.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(parent)
            self._scratch = Path(tempfile.mkdtemp(prefix=f"{self.folder.name}.partial-", dir=parent))
            self._files = {name: (self._scratch / f"{name}.bin").open("wb") for name in _TYPES}
        except OSError as error:
            raise self._unwritable(error) from error
        self._digests = {name: hashlib.sha256() for name in _TYPES}
        self._write("offsets", [0])
        return self

    def _unwritable(self, error: OSError) -> DataError:
        problem = f"The tokens cannot be written to {self.folder.parent}: {error.strerror or error}."
        return DataError(problem, "Check its space and permissions.")

    def add(self, ids: list[int], mask: list[bool], row: int) -> None:
        """Appends one document."""
        self._tokens += len(ids)
        self._documents += 1
        for name, values in (("ids", ids), ("mask", mask), ("offsets", [self._tokens]), ("rows", [row])):
            self._write(name, values)

    def _write(self, name: str, values: list[Any]) -> None:
        data = np.asarray(values, _TYPES[name]).tobytes()
        self._digests[name].update(data)
        try:
            self._files[name].write(data)
        except OSError as error:
            raise self._unwritable(error) from error

    def finish(self, details: dict[str, Any]) -> None:
        """Makes the folder appear. `details` must be JSON."""
        sums = {name: {"sha256": digest.hexdigest()} for name, digest in self._digests.items()}
        together = hashlib.sha256("".join(sums[name]["sha256"] for name in ("ids", "mask", "offsets")).encode())
        meta = {"layout": LAYOUT, "files": sums, "checksum": together.hexdigest(), "details": details}
        try:
            for file in self._files.values():
                file.close()
            (self._scratch / "meta.json").write_text(json.dumps(meta, ensure_ascii=False), "utf-8")
            if self.folder.exists() and open_cache(self.folder) is None:
                shutil.rmtree(self.folder)  # damaged
            with contextlib.suppress(FileExistsError):
                _rename(self._scratch, self.folder)
        except OSError as error:
            raise self._unwritable(error) from error

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk, which has already been reported
                file.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _rename(source: Path, target: Path) -> None:
    """Renames a folder; FileExistsError when the target is there, as it is when another process built the same cache."""
    try:
        source.rename(target)
    except OSError as error:
        if target.exists():
            raise FileExistsError(str(target)) from error
        raise


def _remove_stale(parent: Path) -> None:
    """Removes what builds left behind that were killed."""
    for folder in parent.glob("*.partial-*"):
        with contextlib.suppress(OSError):  # removed by another process, or not ours to remove
            newest = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
            if time.time() - newest > _STALE_S:
                shutil.rmtree(folder, ignore_errors=True)
