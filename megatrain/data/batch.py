"""PackedBatch: what the loader hands to the engine. Numpy only."""

from dataclasses import dataclass

import numpy as np

IGNORE_INDEX = -100


@dataclass(frozen=True)
class PackedBatch:
    """P packs of S tokens, each a row of whole documents followed by padding.

    input_ids: [P, S] int64. labels: [P, S] int64, already shifted: labels[p, s] is the token to predict after
    input_ids[p, s], or IGNORE_INDEX (also at the last token of every document and on padding).
    position_ids: [P, S] int64, restarting at 0 with each document; padding is a document of its own.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    real_tokens: np.ndarray = None  # type: ignore[assignment]  # [P] int64: tokens of each pack that are not padding; None: all

    @property
    def num_packs(self) -> int:
        return self.input_ids.shape[0]

    @property
    def trained_tokens(self) -> int:
        """Tokens with a label."""
        return int((self.labels != IGNORE_INDEX).sum())

    @property
    def num_tokens(self) -> int:
        """Real tokens: padding is not counted."""
        return int(self.real_tokens.sum())

    def __post_init__(self) -> None:
        if self.real_tokens is None:
            object.__setattr__(self, "real_tokens", np.full(self.input_ids.shape[0], self.input_ids.shape[1], np.int64))

    def packs(self, start: int, stop: int) -> "PackedBatch":
        """The rows start..stop, without copying."""
        rows = slice(start, stop)
        return PackedBatch(self.input_ids[rows], self.labels[rows], self.position_ids[rows], self.real_tokens[rows])
