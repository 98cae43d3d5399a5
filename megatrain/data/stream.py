"""The endless order of one source's packs, as a pure function of their index.

Letters: s shard, e epoch, n_s training packs of shard s. An epoch takes the shards one after the other: the first epoch in
the order in which they are written, so that training can follow the tokenising; later ones in an order from the seed. Each
shard is packed by itself and its packs are shuffled anew in every epoch, so which packs a step has depends on nothing but
the rows, the seed and the index. Held-out rows come from the first shard.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatrain.data.background import GrowingShards
from megatrain.data.cache import TokenCache
from megatrain.data.packing import Packs, hash_order, pack_documents

EPOCH_ORDER, HELD_OUT, SHARD_ORDER = 2, 3, 4  # what a hash is for; seeds of different purposes never meet
MIN_ROWS_TO_HOLD_OUT = 20
Pack = tuple[TokenCache, np.ndarray]  # a shard and the documents in it


@dataclass(frozen=True)
class PackedShard:
    """One shard, packed."""

    cache: TokenCache
    train: Packs
    held_out: Packs
    train_tokens: int
    held_out_rows: np.ndarray


class PackStream:
    """The packs of one source. `num_packs` is that of an epoch, guessed while shards are still to come."""

    def __init__(self, shards: GrowingShards, sequence_length: int, seed: int, eval_fraction: float) -> None:
        self._shards, self._length, self._seed, self._fraction = shards, sequence_length, seed, eval_fraction
        self._packed: list[PackedShard] = []
        self._take(shards.wait_for(1).shards)
        self._order = lru_cache(maxsize=4)(self._new_order)

    def _take(self, shards: list[TokenCache]) -> None:
        for cache in shards[len(self._packed) :]:
            fraction = 0.0 if self._packed else self._fraction
            held_out = held_out_rows(np.unique(cache.rows), fraction, self._seed)
            is_held_out = np.isin(cache.rows, held_out)
            train, evaluation = (self._pack(cache, np.flatnonzero(which)) for which in (~is_held_out, is_held_out))
            self._packed.append(PackedShard(cache, train, evaluation, int(cache.lengths[~is_held_out].sum()), held_out))

    def _pack(self, cache: TokenCache, documents: np.ndarray) -> Packs:
        packs = pack_documents(cache.lengths[documents], self._length, self._seed)
        return Packs(documents[packs.documents], packs.starts)

    @property
    def is_complete(self) -> bool:
        return self._shards.known.complete

    @property
    def first(self) -> PackedShard:
        return self._packed[0]

    @property
    def packed(self) -> list[PackedShard]:
        """The shards that are there by now."""
        return self._packed

    @property
    def num_packs(self) -> int:
        known = sum(len(shard.train) for shard in self._packed)
        share = self._shards.known.details.get("share_read", 1.0)
        return known if self.is_complete or not share else max(known, round(known / share))

    @property
    def train_tokens(self) -> int:
        return sum(shard.train_tokens for shard in self._packed)

    @property
    def identity(self) -> str:
        """Names the tokens: by their checksum, or where not all are there yet by the content that they come from."""
        several = len(self._packed) > 1 or not self.is_complete
        return f"{self.first.cache.checksum} {self._shards.known.folder.name}" if several else self.first.cache.checksum

    def pack_at(self, index: int) -> Pack:
        """Pack `index` of the endless sequence. Waits for its shard, if that is still being written."""
        position = index
        shard = 0
        while not self.is_complete or len(self._packed) < len(self._shards.known.shards):  # the first epoch, as it grows
            if shard == len(self._packed):
                self._take(self._shards.wait_for(shard + 1).shards)
                if shard == len(self._packed):
                    break
            if position < len(self._packed[shard].train):
                return self._pack_of(shard, 0, position)
            position -= len(self._packed[shard].train)
            shard += 1
        epoch, position = divmod(index, self.num_packs)
        for number in self._order(len(self._packed), epoch, -1).tolist():
            count = len(self._packed[number].train)
            if position < count:
                return self._pack_of(number, epoch, position)
            position -= count
        raise AssertionError("the packs of an epoch are those of its shards")

    def _pack_of(self, shard: int, epoch: int, position: int) -> Pack:
        packed = self._packed[shard]
        return packed.cache, packed.train[int(self._order(len(packed.train), epoch, shard)[position])]

    def _new_order(self, count: int, epoch: int, shard: int) -> np.ndarray:
        """The order of a shard's packs, or with -1 of the shards."""
        if shard < 0:
            return hash_order(count, self._seed, SHARD_ORDER, epoch) if epoch else np.arange(count)
        return hash_order(count, self._seed, EPOCH_ORDER, epoch, *([shard] if shard else []))


def held_out_rows(rows: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """The rows kept for evaluation, chosen by the seed: none below 20 rows, else at least one and never more than half."""
    count = len(rows)
    if fraction <= 0 or count < MIN_ROWS_TO_HOLD_OUT:
        return rows[:0]
    chosen = min(max(1, round(fraction * count)), count // 2)
    return np.sort(rows[hash_order(count, seed, HELD_OUT)[:chosen]])
