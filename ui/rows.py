"""Tables of numbers that grow: rows of a run as float64 columns, NaN where a reading is absent. Pure numpy, no store."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Table:
    """Rows appended at the end, read as columns. Capacity doubles, so that 100,000 rows stay cheap."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = {name: index for index, name in enumerate(columns)}
        self._cells = np.full((256, len(columns)), np.nan)
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, column: str) -> Floats:
        """A view [rows] float64 of one column; a name that is not a column reads as NaN everywhere."""
        index = self.columns.get(column)
        if index is None:
            return np.full(self._rows, np.nan)
        return self._cells[: self._rows, index]

    def append(self, rows: Iterable[Mapping[str, float | None]]) -> None:
        """Add rows; keys that are no columns are ignored, missing ones become NaN."""
        for row in rows:
            if self._rows == len(self._cells):
                self._cells = np.concatenate([self._cells, np.full_like(self._cells, np.nan)])
            cells = self._cells[self._rows]
            cells[:] = np.nan
            for name, value in row.items():
                if value is not None and name in self.columns:
                    cells[self.columns[name]] = value
            self._rows += 1

    def cut(self, num_rows: int) -> None:
        """Keep the first `num_rows` rows."""
        self._rows = min(self._rows, num_rows)

    def last(self, column: str, count: int = 1) -> float:
        """Mean of the readings among the last `count` rows; NaN when there is none."""
        values = self[column][-count:]
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else float("nan")


def smooth(values: Floats, time_constant: float) -> Floats:
    """Exponential mean of `values` [N] with a time constant in rows; bias-corrected, gaps (NaN, infinite) carry no weight.

    y[k] = sum_j a^(k-j) x[j] / sum_j a^(k-j) over the finite x[j], a = exp(-1 / time_constant). 0 leaves the values as they are.
    """
    if time_constant <= 0 or not len(values):
        return values
    finite = np.isfinite(values)
    decay = float(np.exp(-1.0 / time_constant))
    totals = _decayed_sums(np.where(finite, values, 0.0), decay)
    weights = _decayed_sums(finite.astype(float), decay)
    return np.where(finite, np.divide(totals, weights, out=np.full(len(values), np.nan), where=weights > 0), np.nan)


def _decayed_sums(values: Floats, decay: float) -> Floats:
    """s[k] = decay * s[k-1] + values[k], in blocks short enough that decay^-block stays far from overflow."""
    block = max(1, min(4096, int(200 / -np.log(decay)) if decay < 1 else 4096))
    powers = decay ** np.arange(block)
    sums = np.empty(len(values))
    carry = 0.0
    for start in range(0, len(values), block):
        part = values[start : start + block]
        scale = powers[: len(part)]
        sums[start : start + len(part)] = scale * (np.cumsum(part / scale) + carry * decay)
        carry = float(sums[start + len(part) - 1])
    return sums


def thin(x: Floats, y: Floats, max_points: int = 1000) -> NDArray[np.intp]:
    """Indices [<= max_points] of the rows to draw, ascending; `x` ascends. Few rows are all kept.

    Rows fall into buckets of x whose width is a power of two with fixed borders, so that points drawn once do not shimmer as
    rows arrive. Of each bucket the first, last, smallest and largest row stay, and its first gap: a lone spike survives.
    """
    if len(x) <= max_points:
        return np.arange(len(x))
    span = float(x[-1] - x[0])
    width = 2.0 ** np.ceil(np.log2(span / (max_points / 5 - 2))) if span > 0 else 1.0
    bucket = np.floor(x / width).astype(np.int64)
    starts = np.flatnonzero(np.diff(bucket, prepend=bucket[0] - 1))
    ends = np.append(starts[1:], len(x)) - 1
    finite = np.isfinite(y)
    owner = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(x))))
    keep = [starts, ends]
    for extreme, filler in ((np.minimum, np.inf), (np.maximum, -np.inf)):
        filled = np.where(finite, y, filler)
        hits = np.flatnonzero(finite & (filled == extreme.reduceat(filled, starts)[owner]))
        keep.append(hits[np.unique(owner[hits], return_index=True)[1]])
    gaps = np.flatnonzero(~finite)
    keep.append(gaps[np.unique(owner[gaps], return_index=True)[1]])
    return np.unique(np.concatenate(keep))


def plain(values: Floats) -> list[float | None]:
    """Six significant digits as Python floats, None for what is not finite: small, valid JSON."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 10.0 ** (5 - np.floor(np.log10(np.abs(values))))
        rounded = np.where(np.isfinite(scale) & (values != 0), np.round(values * scale) / scale, values)
    return [value if ok else None for value, ok in zip(rounded.tolist(), np.isfinite(values).tolist(), strict=True)]
