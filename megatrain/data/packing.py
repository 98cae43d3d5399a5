"""Documents -> packs of at most `sequence_length` tokens. Numpy only; pure functions of lengths and seeds.

Letters: N documents, S = sequence_length. Every order comes from `hash_order`, whose numbers are fixed here and not
those of a library, so a run that is resumed after an upgrade sees the same order.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: np.ndarray) -> np.ndarray:
    """splitmix64 of each number. Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014."""
    values = values + _STEP
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))


def hash_order(count: int, *seeds: int) -> np.ndarray:
    """A permutation of 0..count-1, int64, that depends on `count` and the seeds alone."""
    key = np.zeros(1, np.uint64)
    for seed in seeds:
        key = _mixed(key ^ np.uint64(seed))
    return np.argsort(_mixed(np.arange(count, dtype=np.uint64) ^ key), kind="stable")


@dataclass(frozen=True)
class Packs:
    """documents[starts[p] : starts[p + 1]] are the documents of pack p, in order. Both int64."""

    documents: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, pack: int) -> np.ndarray:
        return self.documents[self.starts[pack] : self.starts[pack + 1]]


def pack_documents(lengths: np.ndarray, sequence_length: int, seed: int) -> Packs:
    """Packs that hold every document exactly once, none above S tokens; best fit, longest documents first.

    lengths: [N] int, each 1..S. Documents of one length are taken in an order that follows from the seed, so another
    seed makes other packs; the waste is that of best-fit decreasing (a few percent at worst on mixed lengths).
    """
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= sequence_length:
        raise ValueError(f"lengths must be within 1..{sequence_length}")
    shuffled = hash_order(len(lengths), seed, 1)
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    num_full = int(np.count_nonzero(lengths == sequence_length))
    packs: list[list[int]] = [[document] for document in order[:num_full].tolist()]
    spaces: list[int] = []  # the distinct free spaces of open packs, ascending
    open_packs: dict[int, list[list[int]]] = {}
    for document, length in zip(order[num_full:].tolist(), lengths[order[num_full:]].tolist(), strict=True):
        at = bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces[at]
            pack = open_packs[space].pop()
            if not open_packs[space]:
                del open_packs[space], spaces[at]
        else:
            space, pack = sequence_length, []
            packs.append(pack)
        pack.append(document)
        left = space - length
        if left:
            if left not in open_packs:
                insort(spaces, left)
                open_packs[left] = []
            open_packs[left].append(pack)
    starts = np.cumsum([0, *map(len, packs)], dtype=np.int64)
    documents = np.array([document for pack in packs for document in pack], np.int64)
    return Packs(documents, starts)


def split_text(ids: list[int], mask: list[bool], sequence_length: int) -> list[tuple[list[int], list[bool]]]:
    """A text in consecutive documents of at most S tokens; nothing is lost but the label of each piece's first token."""
    starts = range(0, len(ids), sequence_length)
    return [(ids[start : start + sequence_length], mask[start : start + sequence_length]) for start in starts]


def cut_conversation(ids: list[int], mask: list[bool], sequence_length: int, keep_first: bool) -> tuple[list[int], list[bool]]:
    """S consecutive tokens of a longer row, with as much of its answers as possible.

    The beginning is kept when at least half of it would be trained: an answer needs its question more than its end.
    Otherwise the first window with the most trained tokens is taken. With `keep_first` the row's first token (BOS) stays
    in front, in place of one more token.
    """
    trained = np.cumsum([0, *mask])
    counts = trained[sequence_length:] - trained[:-sequence_length]  # [len - S + 1] trained tokens of each window
    start = 0 if 2 * counts[0] >= sequence_length else int(np.argmax(counts))
    window = slice(start, start + sequence_length)
    if start and keep_first:
        inner = slice(start + 1, start + sequence_length)
        return [ids[0], *ids[inner]], [False, *mask[inner]]
    return ids[window], mask[window]
