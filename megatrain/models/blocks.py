"""Blocks and their flat layout.

A block's states are flat buffers in which every parameter has a fixed place, so that one copy moves a block.
Compute weights are one byte buffer of three sections: segment `a` (parameters in the compute dtype), segment `b`
(parameters that the model keeps in fp32), and the buffers that travel with the block. Gradients and moments are one
fp32 (or gradient-dtype) array over the elements of `a` followed by those of `b`.
Invariant: places depend on the model and the precision only, never on a plan.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

ALIGN_ELEMENTS = 64  # 128 bytes in bf16: what vector loads and tensor-core kernels ask for
ALIGN_BYTES = 256


def _aligned(value: int, to: int) -> int:
    return -(-value // to) * to


@dataclass(frozen=True)
class ParamEntry:
    """One trained parameter. `offset` counts elements inside its segment."""

    name: str  # full module name in the transformers model
    shape: tuple[int, ...]
    segment: str  # "a": compute dtype, "b": kept in fp32
    offset: int
    numel: int
    decay: bool  # takes part in weight decay


@dataclass(frozen=True)
class BufferEntry:
    """One buffer that travels with its block. `offset` counts bytes inside the buffer section."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int
    persistent: bool


@dataclass(frozen=True)
class BlockLayout:
    """Where everything lies in the flat states of one block."""

    name: str
    kind: str
    entries: tuple[ParamEntry, ...]
    buffers: tuple[BufferEntry, ...]
    numel_a: int
    numel_b: int
    compute_dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of gradients and of each moment, alignment gaps included."""
        return self.numel_a + self.numel_b

    @property
    def bytes_a(self) -> int:
        return _aligned(self.numel_a * self.compute_dtype.itemsize, ALIGN_BYTES)

    @property
    def bytes_b(self) -> int:
        return _aligned(self.numel_b * 4, ALIGN_BYTES)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the compute weights: both segments and the buffers."""
        return self.bytes_a + self.bytes_b + sum(_aligned(entry.num_bytes, ALIGN_BYTES) for entry in self.buffers)

    def segment_a(self, weights: torch.Tensor) -> torch.Tensor:
        """[numel_a] compute dtype, a view of the byte buffer `weights`."""
        return weights[: self.numel_a * self.compute_dtype.itemsize].view(self.compute_dtype)

    def segment_b(self, weights: torch.Tensor) -> torch.Tensor:
        """[numel_b] fp32, a view of the byte buffer `weights`."""
        return weights[self.bytes_a : self.bytes_a + self.numel_b * 4].view(torch.float32)

    def buffer_section(self, weights: torch.Tensor) -> torch.Tensor:
        """[bytes] uint8, a view of the byte buffer `weights`."""
        return weights[self.bytes_a + self.bytes_b : self.weight_bytes]

    def weight_views(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every parameter and buffer by name, shaped, as views of the byte buffer `weights`."""
        segments = {"a": self.segment_a(weights), "b": self.segment_b(weights)}
        views = {e.name: segments[e.segment][e.offset : e.offset + e.numel].view(e.shape) for e in self.entries}
        section = self.buffer_section(weights)
        for entry in self.buffers:
            views[entry.name] = section[entry.offset : entry.offset + entry.num_bytes].view(entry.dtype).view(entry.shape)
        return views

    def flat_views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every parameter by name, shaped, as views of a flat [numel] array of gradients or moments."""
        start = {"a": 0, "b": self.numel_a}
        return {e.name: flat[start[e.segment] + e.offset :][: e.numel].view(e.shape) for e in self.entries}

    def decay_ranges(self) -> list[tuple[int, int, bool]]:
        """(start, stop, decay) over the [numel] elements: neighbours with the same decay joined, gaps left out."""
        start = {"a": 0, "b": self.numel_a}
        ranges: list[tuple[int, int, bool]] = []
        for entry in sorted(self.entries, key=lambda e: start[e.segment] + e.offset):
            first = start[entry.segment] + entry.offset
            if ranges and ranges[-1][2] == entry.decay and _aligned(ranges[-1][1], ALIGN_ELEMENTS) == first != self.numel_a:
                ranges[-1] = (ranges[-1][0], first + entry.numel, entry.decay)
            else:
                ranges.append((first, first + entry.numel, entry.decay))
        return ranges


def lay_out(
    name: str,
    kind: str,
    params: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    compute_dtype: torch.dtype,
    fp32_names: frozenset[str],
    decay_names: frozenset[str],
    persistent_buffers: frozenset[str],
) -> BlockLayout:
    """Give every parameter and buffer of a block its place, in the order given."""
    entries: list[ParamEntry] = []
    filled = {"a": 0, "b": 0}
    for param_name, param in params.items():
        segment = "b" if param_name in fp32_names and compute_dtype is not torch.float32 else "a"
        offset = filled[segment]
        entries.append(ParamEntry(param_name, tuple(param.shape), segment, offset, param.numel(), param_name in decay_names))
        filled[segment] = _aligned(offset + param.numel(), ALIGN_ELEMENTS)
    placed: list[BufferEntry] = []
    position = 0
    for buffer_name, buffer in buffers.items():
        num_bytes = buffer.numel() * buffer.element_size()
        placed.append(BufferEntry(buffer_name, tuple(buffer.shape), buffer.dtype, position, num_bytes, buffer_name in persistent_buffers))
        position += _aligned(num_bytes, ALIGN_BYTES)
    return BlockLayout(name, kind, tuple(entries), tuple(placed), filled["a"], filled["b"], compute_dtype)


def layout_record(layout: BlockLayout) -> dict[str, Any]:
    """The layout as JSON values, for a checkpoint's manifest."""
    record = asdict(layout)
    for part in (record, *record["buffers"]):
        key = "compute_dtype" if part is record else "dtype"
        part[key] = str(part[key]).removeprefix("torch.")
    return record


def layout_from_record(record: Mapping[str, Any]) -> BlockLayout:
    """The inverse of `layout_record`, also after JSON has made lists of tuples."""
    entries = tuple(ParamEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in record["entries"])
    buffers = tuple(
        BufferEntry(**{**entry, "shape": tuple(entry["shape"]), "dtype": getattr(torch, entry["dtype"])}) for entry in record["buffers"]
    )
    return BlockLayout(**{**record, "entries": entries, "buffers": buffers, "compute_dtype": getattr(torch, record["compute_dtype"])})
