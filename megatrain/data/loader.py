"""Loader: the batch of every step, as a pure function of the step's index.

Letters: P packs per step, S sequence length. Pack g of the run (g = step * P + position) is pack order[g mod n] of the
n training packs, where `order` follows from the seed and the epoch g div n. So the position in the data is one
integer, a step that crosses the end of an epoch is filled from the next one, and nothing else decides what a step holds.
"""

import hashlib

import numpy as np

from megatrain.config import RunConfig
from megatrain.data.batch import IGNORE_INDEX, PackedBatch
from megatrain.data.cache import TokenCache
from megatrain.data.packing import Packs, hash_order, pack_documents

_EPOCH_ORDER, _HELD_OUT = 2, 3  # what a hash is for; seeds of different purposes never meet
MIN_ROWS_TO_HOLD_OUT = 20


class Loader:
    """Endless batches of the training rows, and the packs of the held-out ones. Safe to use from several threads."""

    def __init__(self, cache: TokenCache, config: RunConfig, pad_id: int) -> None:
        self.sequence_length = config.data.sequence_length
        self.packs_per_step = config.packs_per_step
        self._seed = config.train.seed
        self._max_eval_packs = config.evaluation.max_packs
        self._cache, self._pad_id = cache, pad_id
        held_out = held_out_rows(np.unique(cache.rows), config.data.eval_fraction, self._seed)
        self.eval_rows = len(held_out)
        is_held_out = np.isin(cache.rows, held_out)
        self._train = self._packed(np.flatnonzero(~is_held_out))
        self._eval = self._packed(np.flatnonzero(is_held_out))
        self.num_packs = len(self._train)
        self.steps_per_epoch = -(-self.num_packs // self.packs_per_step)
        self.train_tokens = int(cache.lengths[~is_held_out].sum())
        order = [self.sequence_length, self.packs_per_step, self._seed, config.data.eval_fraction, self._max_eval_packs]
        self.fingerprint = hashlib.sha256(f"{cache.checksum} {order}".encode()).hexdigest()
        self._order: tuple[int, np.ndarray] | None = None

    def _packed(self, documents: np.ndarray) -> Packs:
        packs = pack_documents(self._cache.lengths[documents], self.sequence_length, self._seed)
        return Packs(documents[packs.documents], packs.starts)

    @property
    def packing_efficiency(self) -> float:
        """Real tokens in the training packs, as a share of their room."""
        return self.train_tokens / (self.num_packs * self.sequence_length) if self.num_packs else 0.0

    def step_batch(self, step: int) -> PackedBatch:
        """The packs of one step, [P, S]; `step` counts from 0 and has no end. The arrays are new at every call."""
        first = step * self.packs_per_step
        return self._batch(self._train, [self._pack_at(index) for index in range(first, first + self.packs_per_step)])

    def epoch(self, step: int) -> float:
        """Passes over the training rows after `step` steps."""
        return step * self.packs_per_step / self.num_packs

    def eval_batches(self, packs: int) -> list[PackedBatch]:
        """The held-out packs, at most `evaluation.max_packs`, in batches of `packs`; the last may be smaller."""
        order = hash_order(len(self._eval), self._seed, _HELD_OUT)[: self._max_eval_packs].tolist()
        return [self._batch(self._eval, order[start : start + packs]) for start in range(0, len(order), packs)]

    def _pack_at(self, index: int) -> int:
        epoch, position = divmod(index, self.num_packs)
        known = self._order
        if known is None or known[0] != epoch:
            known = self._order = (epoch, hash_order(self.num_packs, self._seed, _EPOCH_ORDER, epoch))
        return int(known[1][position])

    def _batch(self, source: Packs, packs: list[int]) -> PackedBatch:
        shape = (len(packs), self.sequence_length)
        input_ids = np.full(shape, self._pad_id, np.int64)
        labels = np.full(shape, IGNORE_INDEX, np.int64)
        position_ids = np.zeros(shape, np.int64)
        real_tokens = np.zeros(len(packs), np.int64)
        for line, pack in enumerate(packs):
            at = 0
            for document in source[pack].tolist():
                start, stop = int(self._cache.offsets[document]), int(self._cache.offsets[document + 1])
                ids, mask = self._cache.ids[start:stop], self._cache.mask[start:stop]
                end = at + len(ids)
                input_ids[line, at:end] = ids
                labels[line, at : end - 1] = np.where(mask[1:], ids[1:].astype(np.int64), IGNORE_INDEX)
                position_ids[line, at:end] = np.arange(len(ids))
                at = end
            position_ids[line, at:] = np.arange(self.sequence_length - at)
            real_tokens[line] = at
        return PackedBatch(input_ids, labels, position_ids, real_tokens)


def held_out_rows(rows: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """The rows kept for evaluation, chosen by the seed: none below 20 rows, else at least one and never more than half."""
    count = len(rows)
    if fraction <= 0 or count < MIN_ROWS_TO_HOLD_OUT:
        return rows[:0]
    chosen = min(max(1, round(fraction * count)), count // 2)
    return np.sort(rows[hash_order(count, seed, _HELD_OUT)[:chosen]])
