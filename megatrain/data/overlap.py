"""Rows that are there twice: within the data, and on both sides of the held-out border."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatrain.data.report import MAX_EXAMPLES
from megatrain.data.stream import PackedShard, PackStream

_AT_ONCE = 1 << 24  # hashes that are sorted at once: bounds the memory, whatever the number of rows


@dataclass(frozen=True)
class Overlap:
    """Counts of rows, and the first of the duplicates with what they repeat."""

    duplicates: int = 0
    eval_overlap: int = 0
    examples: list[tuple[int, str]] = field(default_factory=list)


def find(streams: Sequence[PackStream]) -> Overlap:
    """Rows with the same tokens and mask, by their 64-bit hashes; nothing for tokens that were stored without them."""
    shards = [shard for stream in streams for shard in stream.packed if shard.cache.hashes is not None]
    rows = [_rows(shard) for shard in shards]
    count = sum(len(hashes) for hashes, _, _ in rows)
    slices = -(-count // _AT_ONCE) or 1
    duplicates = eval_overlap = 0
    examples: list[tuple[int, str]] = []
    for part in range(slices):
        chosen = [hashes % np.uint64(slices) == part for hashes, _, _ in rows]
        hashes, numbers, held_out = (
            np.concatenate([array[which] for array, which in zip(arrays, chosen, strict=True)]) if rows else np.zeros(0)
            for arrays in (zip(*rows, strict=True) if rows else ((), (), ()))
        )
        unique, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        duplicates += len(hashes) - len(unique)
        eval_overlap += int(np.isin(hashes[held_out.astype(bool)], hashes[~held_out.astype(bool)]).sum())
        repeats = np.flatnonzero(first[inverse] != np.arange(len(hashes)))[: MAX_EXAMPLES - len(examples)]
        examples += [(int(numbers[at]), f"the same as row {int(numbers[first[inverse[at]]])}") for at in repeats]
    return Overlap(duplicates, eval_overlap, examples)


def _rows(shard: PackedShard) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(hash, number, whether it is held out) of each row of a shard: its documents stand together."""
    rows, hashes = shard.cache.rows, shard.cache.hashes
    assert hashes is not None
    begins = np.flatnonzero(np.diff(rows, prepend=-1))
    return np.asarray(hashes[begins]), np.asarray(rows[begins]), np.isin(rows[begins], shard.held_out_rows)
