"""Loader: the batch of every step, as a pure function of the step's index.

Letters: P packs per step, S sequence length. Pack g of the run (g = step * P + position) is, with one source, pack g of that
source's endless sequence (stream.py). A mixture has K packs an epoch: of source i with weight w_i, and n_i packs of its own,
k_i = w_i * n_i of them, which go on through that source's sequence where the epoch before ended; the K are shuffled
together. So the position in the data is one integer, a step that crosses the end of an epoch is filled from the next one,
and nothing else decides what a step holds.
"""

import hashlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from megatrain.config import RunConfig
from megatrain.data.background import GrowingShards
from megatrain.data.batch import IGNORE_INDEX, PackedBatch
from megatrain.data.cache import Shards, TokenCache
from megatrain.data.packing import hash_order
from megatrain.data.stream import HELD_OUT, Pack, PackStream, held_out_rows

_MIXTURE_ORDER = 5  # what a hash is for, like those in stream.py

__all__ = ["Loader", "held_out_rows"]


class Loader:
    """Endless batches of the training rows, and the packs of the held-out ones. Safe to use from several threads.

    `data` is one tokenised source, or several with their weights.
    """

    def __init__(self, data: TokenCache | Sequence[tuple[GrowingShards, float]], config: RunConfig, pad_id: int) -> None:
        self.sequence_length = config.data.sequence_length
        self.packs_per_step = config.packs_per_step
        self._seed = config.train.seed
        self._max_eval_packs = config.evaluation.max_packs
        self._pad_id = pad_id
        sources = [(GrowingShards(Shards(data.folder, [data], True)), 1.0)] if isinstance(data, TokenCache) else list(data)
        self.weights = [weight for _, weight in sources]
        self.streams = [PackStream(shards, self.sequence_length, self._seed, config.data.eval_fraction) for shards, _ in sources]
        self.is_mixture = self.weights != [1.0]
        self.eval_rows = sum(len(stream.first.held_out_rows) for stream in self.streams)
        self.fingerprint = self._fingerprint(config)
        self._order: tuple[int, np.ndarray] | None = None

    def _fingerprint(self, config: RunConfig) -> str:
        order = [self.sequence_length, self.packs_per_step, self._seed, config.data.eval_fraction, self._max_eval_packs]
        tokens = " ".join(stream.identity for stream in self.streams) + (f" {self.weights}" if self.is_mixture else "")
        return hashlib.sha256(f"{tokens} {order}".encode()).hexdigest()

    @property
    def packs_by_source(self) -> list[int]:
        """Packs that an epoch takes from each source."""
        if not self.is_mixture:
            return [self.streams[0].num_packs]
        return [max(1, round(weight * stream.num_packs)) for stream, weight in zip(self.streams, self.weights, strict=True)]

    @property
    def num_packs(self) -> int:
        """Packs of an epoch; a guess while the rest of the data is still being tokenised."""
        return sum(self.packs_by_source)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_packs // self.packs_per_step)

    @property
    def packing_efficiency(self) -> float:
        """Real tokens in the training packs, as a share of their room."""
        room = sum(len(shard.train) for stream in self.streams for shard in stream.packed) * self.sequence_length
        return sum(stream.train_tokens for stream in self.streams) / room if room else 0.0

    def step_batch(self, step: int) -> PackedBatch:
        """The packs of one step, [P, S]; `step` counts from 0 and has no end. The arrays are new at every call."""
        first = step * self.packs_per_step
        return self._batch([self._pack_at(index) for index in range(first, first + self.packs_per_step)])

    def epoch(self, step: int) -> float:
        """Passes over the training rows after `step` steps."""
        return step * self.packs_per_step / self.num_packs

    def eval_batches(self, packs: int) -> list[PackedBatch]:
        """The held-out packs, at most `evaluation.max_packs`, in batches of `packs`; the last may be smaller."""
        firsts = [stream.first for stream in self.streams]
        held_out = [(shard.cache, shard.held_out[pack]) for shard in firsts for pack in range(len(shard.held_out))]
        order = hash_order(len(held_out), self._seed, HELD_OUT)[: self._max_eval_packs].tolist()
        return [self._batch([held_out[index] for index in order[start : start + packs]]) for start in range(0, len(order), packs)]

    def _pack_at(self, index: int) -> Pack:
        if not self.is_mixture:
            return self.streams[0].pack_at(index)
        counts = self.packs_by_source
        epoch, position = divmod(index, sum(counts))
        known = self._order
        if known is None or known[0] != epoch:
            known = self._order = (epoch, hash_order(sum(counts), self._seed, _MIXTURE_ORDER, epoch))
        place = int(known[1][position])
        for stream, count, end in zip(self.streams, counts, accumulate(counts), strict=True):
            if place < end:
                return stream.pack_at(epoch * count + place - (end - count))
        raise AssertionError("every place of an epoch belongs to a source")

    def _batch(self, packs: list[Pack]) -> PackedBatch:
        shape = (len(packs), self.sequence_length)
        input_ids = np.full(shape, self._pad_id, np.int64)
        labels = np.full(shape, IGNORE_INDEX, np.int64)
        position_ids = np.zeros(shape, np.int64)
        real_tokens = np.zeros(len(packs), np.int64)
        for line, (cache, documents) in enumerate(packs):
            at = 0
            for document in documents.tolist():
                start, stop = int(cache.offsets[document]), int(cache.offsets[document + 1])
                ids, mask = cache.ids[start:stop], cache.mask[start:stop]
                end = at + len(ids)
                input_ids[line, at:end] = ids
                labels[line, at : end - 1] = np.where(mask[1:], ids[1:].astype(np.int64), IGNORE_INDEX)
                position_ids[line, at:end] = np.arange(len(ids))
                at = end
            position_ids[line, at:] = np.arange(self.sequence_length - at)
            real_tokens[line] = at
        return PackedBatch(input_ids, labels, position_ids, real_tokens)
