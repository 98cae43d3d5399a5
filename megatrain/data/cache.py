"""Tokenised documents on disk: written once as a stream, then memory-mapped.

A shard is a folder with ids.bin (uint32), mask.bin (bool), offsets.bin (int64, N + 1), rows.bin (int64, the row that each
document comes from), hashes.bin (uint64, of that row's tokens) and meta.json, which is written last and carries the
checksum of the others. A shard is built under a temporary name and renamed, so one that is there is complete; one that
fails its checksums is not used.

Data of up to SHARD_TOKENS is one shard: the cache folder itself. More is cut into shards `shard-00000`, `shard-00001`,
... inside it, each of which can be trained on as soon as it is there, and a meta.json that is written when all are. The
cuts follow from the rows alone, so a build that was killed goes on behind its last shard and ends with the same ones.
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
SHARD_TOKENS = 1 << 26  # a shard ends with the batch of rows that reaches this
_TYPES = {"ids": np.uint32, "mask": np.bool_, "offsets": np.int64, "rows": np.int64, "hashes": np.uint64}
_NEEDED = ("ids", "mask", "offsets", "rows")  # hashes came later; without them nothing is known of duplicates
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
    hashes: np.ndarray | None = None  # [N] uint64

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Shards:
    """The shards of one tokenised source, as many as there are. `details` are those of the last one, and whole if `complete`."""

    folder: Path
    shards: list[TokenCache]
    complete: bool

    @property
    def details(self) -> dict[str, Any]:
        return self.shards[-1].details if self.shards else {}


def open_shards(folder: Path, known: Shards | None = None) -> Shards:
    """What there is of a cache. Shards in `known` are not verified again."""
    whole = open_cache(folder)
    if whole is not None:
        return Shards(folder, [whole], complete=True)
    shards = list(known.shards) if known else []
    while (shard := open_cache(folder / f"shard-{len(shards):05d}")) is not None:
        shards.append(shard)
    try:
        wanted = json.loads((folder / "meta.json").read_text("utf-8"))["shards"]
    except (OSError, ValueError, KeyError, TypeError):
        wanted = None
    return Shards(folder, shards, complete=wanted == len(shards))


def open_cache(folder: Path) -> TokenCache | None:
    """The shard in `folder`, with every checksum verified; None when it is missing, incomplete or damaged."""
    try:
        meta = json.loads((folder / "meta.json").read_text("utf-8"))
        if meta["layout"] != LAYOUT:
            return None
        names = [name for name in _TYPES if name in _NEEDED or name in meta["files"]]
        for name in names:
            with (folder / f"{name}.bin").open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != meta["files"][name]["sha256"]:
                    return None
        arrays = {name: _mapped(folder / f"{name}.bin", _TYPES[name]) for name in names}
        return TokenCache(folder, details=meta["details"], checksum=meta["checksum"], **arrays)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mapped(path: Path, kind: Any) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.zeros(0, kind)
    return np.memmap(path, kind, mode="r")


class CacheWriter:
    """Collects documents into shards, of which a single one appears under its name only when `finish` is called.

    Leaving the `with` block without `finish` removes the shard that is being written.
    """

    def __init__(self, folder: Path, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self._shard_tokens = folder, shard_tokens
        self.known = open_shards(folder)  # a build before this one may have left some
        self._num_shards = len(self.known.shards)

    def __enter__(self) -> "CacheWriter":
        parent = self.folder.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(parent)
        except OSError as error:
            raise self._unwritable(error) from error
        self._begin()
        return self

    def _begin(self) -> None:
        try:
            self._scratch = Path(tempfile.mkdtemp(prefix=f"{self.folder.name}.partial-", dir=self.folder.parent))
            self._files = {name: (self._scratch / f"{name}.bin").open("wb") for name in _TYPES}
        except OSError as error:
            raise self._unwritable(error) from error
        self._digests = {name: hashlib.sha256() for name in _TYPES}
        self._tokens = 0
        self._write("offsets", [0])

    def _unwritable(self, error: OSError) -> DataError:
        problem = f"The tokens cannot be written to {self.folder.parent}: {error.strerror or error}."
        return DataError(problem, "Check its space and permissions.")

    def add(self, ids: Any, mask: Any, row: int, row_hash: int = 0) -> None:
        """Appends one document: ids and mask as lists or arrays."""
        self._tokens += len(ids)
        for name, values in (("ids", ids), ("mask", mask), ("offsets", [self._tokens]), ("rows", [row]), ("hashes", [row_hash])):
            self._write(name, values)

    def _write(self, name: str, values: Any) -> None:
        data = np.asarray(values, _TYPES[name]).tobytes()
        self._digests[name].update(data)
        try:
            self._files[name].write(data)
        except OSError as error:
            raise self._unwritable(error) from error

    @property
    def is_full(self) -> bool:
        return self._tokens >= self._shard_tokens

    def end_shard(self, details: dict[str, Any]) -> None:
        """The shard that is being written appears, and another one begins."""
        self._close(self.folder / f"shard-{self._num_shards:05d}", details)
        self._num_shards += 1
        self._begin()

    def finish(self, details: dict[str, Any]) -> None:
        """Makes the cache whole. `details` must be JSON."""
        if not self._num_shards:
            self._close(self.folder, details)
            return
        self._close(self.folder / f"shard-{self._num_shards:05d}", details)
        try:
            scratch = self._scratch.with_suffix(".meta")
            scratch.write_text(json.dumps({"layout": LAYOUT, "shards": self._num_shards + 1}), "utf-8")
            scratch.replace(self.folder / "meta.json")
        except OSError as error:
            raise self._unwritable(error) from error

    def _close(self, folder: Path, details: dict[str, Any]) -> None:
        """The files become the shard `folder`."""
        sums = {name: {"sha256": digest.hexdigest()} for name, digest in self._digests.items()}
        together = hashlib.sha256("".join(sums[name]["sha256"] for name in ("ids", "mask", "offsets")).encode())
        meta = {"layout": LAYOUT, "files": sums, "checksum": together.hexdigest(), "details": details}
        try:
            for file in self._files.values():
                file.close()
            (self._scratch / "meta.json").write_text(json.dumps(meta, ensure_ascii=False), "utf-8")
            folder.parent.mkdir(exist_ok=True)
            if folder.exists() and open_cache(folder) is None:
                shutil.rmtree(folder)  # damaged
            with contextlib.suppress(FileExistsError):
                _rename(self._scratch, folder)
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
