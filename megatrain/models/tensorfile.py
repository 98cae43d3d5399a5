"""safetensors files, read and written as streams: never mapped, never whole in memory.

A file is 8 bytes (length of the header, little endian), a JSON header that places every tensor, then the bytes of the
tensors without gaps. Mapped reading crashes natively on some systems when the file is large or vanishes; here a short
or damaged file is an error that names it. Format: https://github.com/huggingface/safetensors (format section).
"""

import contextlib
import errno
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain import platform
from megatrain.errors import DiskFullError, MegaTrainError, ModelError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK_BYTES = 8 << 20
_HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Place:
    """One tensor of a file; `start` counts bytes from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@contextlib.contextmanager
def disk_errors(path: Path, error: type[MegaTrainError]) -> Iterator[None]:
    """Inside, a full disk is a DiskFullError that names `path`, any other failure of the system an `error`."""
    try:
        yield
    except OSError as failure:
        if failure.errno in _DISK_FULL:
            raise DiskFullError(f"No space is left to write {path}.", "Free disk space, then try again.") from failure
        raise error(f"{path}: {failure.strerror or failure}") from failure


class TensorFile:
    """The header of one safetensors file, checked; tensors are read one at a time. Safe from many threads."""

    def __init__(self, path: Path, error: type[MegaTrainError] = ModelError) -> None:
        """`error` is raised, naming the file, when it is missing, short or damaged."""
        self.path, self.error = path, error
        with disk_errors(path, error), path.open("rb") as file:
            self.num_bytes = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version ":
                raise error(f"{path} is only a Git LFS pointer, not the weights.", "Fetch the file itself, with `git lfs pull`.")
            if len(start) < 8 or length > min(_HEADER_LIMIT_BYTES, self.num_bytes - 8):
                raise error(f"{path} is truncated, or no safetensors file.", "Download it again.")
            self.header_bytes = 8 + length
            self._read_header(file.read(length))

    def _read_header(self, text: bytes) -> None:
        try:
            raw = json.loads(text)
            self.metadata: dict[str, str] = raw.pop("__metadata__", {})
            self.places = {name: self._place(entry) for name, entry in raw.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as failure:
            raise self.error(f"{self.path} has a damaged header: {failure}", "Download it again.") from failure
        end = self.header_bytes
        for name, place in sorted(self.places.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
            if place.start != end:
                raise self.error(f"{self.path} has a damaged header: {name} does not follow the tensor before it.", "Download it again.")
            end += place.num_bytes
        if end != self.num_bytes:
            what = f"is truncated: {end - self.num_bytes} bytes are missing" if end > self.num_bytes else "is longer than its header says"
            raise self.error(f"{self.path} {what}.", "Download it again.")

    def _place(self, entry: dict) -> Place:
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"unknown type {entry['dtype']!r}")
        place = Place(DTYPES[entry["dtype"]], tuple(entry["shape"]), self.header_bytes + entry["data_offsets"][0])
        if any(not isinstance(size, int) or size < 0 for size in place.shape) or entry["data_offsets"][0] < 0:
            raise ValueError(f"impossible shape {list(place.shape)}")
        if place.start + place.num_bytes != self.header_bytes + entry["data_offsets"][1]:
            raise ValueError(f"{entry['data_offsets']} does not hold {entry['dtype']} {list(place.shape)}")
        return place

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU, in the file's dtype and in memory of its own."""
        place = self.places[name]
        with self._open() as descriptor:
            return _read(descriptor, place, self)

    def chunks(self, name: str) -> Iterator[memoryview]:
        """The tensor's bytes, in pieces that are overwritten by the next."""
        place = self.places[name]
        with self._open() as descriptor:
            yield from _pieces(descriptor, place.start, place.num_bytes, self)

    def read_checked(self, sha256: str, wanted: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """The `wanted` tensors (None: all), read in one pass over the whole file, whose hash must be `sha256`."""
        digest = hashlib.sha256()
        found: dict[str, torch.Tensor] = {}
        with self._open() as descriptor:
            for piece in _pieces(descriptor, 0, self.header_bytes, self):
                digest.update(piece)
            for name, place in sorted(self.places.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
                if wanted is None or name in wanted:
                    found[name] = _read(descriptor, place, self)
                    digest.update(bytes_of(found[name]))
                else:
                    for piece in _pieces(descriptor, place.start, place.num_bytes, self):
                        digest.update(piece)
        if digest.hexdigest() != sha256:
            raise self.error(f"{self.path} is damaged: its checksum is not the recorded one.")
        return found

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        with disk_errors(self.path, self.error), self.path.open("rb", buffering=0) as file:
            try:
                yield file.fileno()
            except EOFError as failure:
                raise self.error(f"{self.path} is truncated: {failure}.") from failure


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, not a copy of it."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _read(descriptor: int, place: Place, file: TensorFile) -> torch.Tensor:
    try:
        raw = torch.empty(place.num_bytes, dtype=torch.uint8)
    except RuntimeError as failure:
        raise file.error(f"{file.path}: there is no memory for a tensor of {place.num_bytes} bytes.") from failure
    if place.num_bytes:
        platform.read_at(descriptor, raw.numpy(), place.start)
    return raw.view(place.dtype).view(place.shape)


def _pieces(descriptor: int, start: int, num_bytes: int, file: TensorFile) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(CHUNK_BYTES, num_bytes)))
    for offset in range(0, num_bytes, CHUNK_BYTES):
        piece = buffer[: min(CHUNK_BYTES, num_bytes - offset)]
        platform.read_at(descriptor, piece, start + offset)
        yield piece


def header(specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, Place]]:
    """The first bytes of a file that holds these tensors in this order, and where each will lie. Data starts 64-byte aligned."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape) in specs.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    places, start = {}, 8 + len(text)
    for name, (dtype, shape) in specs.items():
        places[name] = Place(dtype, shape, start)
        start += places[name].num_bytes
    return len(text).to_bytes(8, "little") + text, places


class TensorFileWriter:
    """A safetensors file whose tensors are known before their values: the header first, then each in its place, in any order."""

    def __init__(
        self, path: Path, specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], error: type[MegaTrainError], metadata: Mapping[str, str]
    ) -> None:
        """Creates the file. `error` is raised when the system refuses; DiskFullError when there is no space."""
        self.header, self.places = header(specs, metadata)
        self.path, self.error = path, error
        self.num_bytes = len(self.header) + sum(place.num_bytes for place in self.places.values())
        self.missing = set(specs)
        with disk_errors(path, error):
            self._file = path.open("wb", buffering=0)
            with self._closed_on_failure():
                platform.write_at(self._file.fileno(), self.header, 0)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put a contiguous CPU tensor in its place."""
        place = self.places[name]
        if tensor.dtype != place.dtype or tuple(tensor.shape) != place.shape:
            raise ValueError(f"{name} was announced as {place.dtype} {place.shape}, not {tensor.dtype} {tuple(tensor.shape)}")
        memory = bytes_of(tensor)
        with disk_errors(self.path, self.error), self._closed_on_failure():
            if len(memory):
                platform.write_at(self._file.fileno(), memory, place.start)
        self.missing.discard(name)

    def close(self) -> None:
        """Flush to the disk. ValueError when a tensor was never written."""
        with disk_errors(self.path, self.error), self._closed_on_failure():
            if self.missing:
                raise ValueError(f"{self.path}: never written: {', '.join(sorted(self.missing)[:4])}")
            os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close without flushing; the file is of no use."""
        self._file.close()

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):
            self._file.close()
            raise
