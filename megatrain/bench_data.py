"""What is trained on while a step is measured: synthetic documents, tokenised, packed and batched as those of a run, and
weights to begin with. Neither hub nor tokenizer is needed.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatrain.config import RunConfig
from megatrain.data import stdlib
from megatrain.data.cache import CacheWriter, open_cache
from megatrain.data.loader import Loader

if TYPE_CHECKING:
    import torch

MEDIAN_TOKENS = 350
_SPREAD = 1.0  # of the logarithm of lengths
_SHORTEST = 8
_MOST_PACKS = 2048  # more would only take time
_ZIPF_SHIFT = 2.7  # the most frequent words are less frequent than Zipf's law says (Mandelbrot)
_FEW = 1 << 22  # random numbers are drawn


def synthetic(config: RunConfig, vocab_size: int, folder: Path, median_tokens: int = MEDIAN_TOKENS) -> Loader:
    """Documents of log-normal lengths, cut at the sequence length, with tokens as frequent as words are (Zipf).

    Where the median reaches the sequence length, every document fills a pack. The tokens are kept in `folder`.
    """
    length, rng = config.data.sequence_length, np.random.default_rng(0)
    wanted = length * min(_MOST_PACKS, 4 * config.packs_per_step)
    sizes: list[int] = []
    while sum(sizes) < wanted:
        drawn = rng.lognormal(np.log(median_tokens), _SPREAD, 16).astype(np.int64) if median_tokens < length else [length]
        sizes += np.clip(drawn, _SHORTEST, length).tolist()
    frequency = np.cumsum(1 / (np.arange(vocab_size) + 1 + _ZIPF_SHIFT))
    ids = np.searchsorted(frequency, rng.random(sum(sizes)) * frequency[-1])
    return _loader(np.split(np.minimum(ids, vocab_size - 1), np.cumsum(sizes)[:-1]), config, folder)


def library(config: RunConfig, folder: Path) -> Loader:
    """The functions of Python's standard library, a byte per token: text whose loss falls. The tokens are kept in `folder`."""
    most = config.data.sequence_length - 1
    texts = (np.frombuffer(function.source.encode("utf-8")[:most], np.uint8) for function in stdlib.functions())
    return _loader([np.append(text.astype(np.int64) + 3, 2) for text in texts], config, folder)


def _loader(documents: Sequence[np.ndarray], config: RunConfig, folder: Path) -> Loader:
    tokens = folder / "tokens"
    with CacheWriter(tokens) as writer:
        for row, ids in enumerate(documents):
            writer.add(ids, np.ones(len(ids), np.bool_), row)
        writer.finish({})
    cache = open_cache(tokens)
    if cache is None:
        raise RuntimeError(f"the tokens in {tokens} cannot be read back")
    return Loader(cache, config, pad_id=0)


class Noise:
    """Weights that cost no time to make: normal numbers (deviation 0.02, bf16), ones for norms, zeros for biases.

    Matrices are views of one block as large as the largest of them, each from a place of its own.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        import torch

        self._shapes = shapes
        few = (torch.randn(_FEW, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
        self._block = few.repeat(2 + max(math.prod(shape) for shape in shapes.values()) // _FEW)

    def tensors(self, names: Iterable[str]) -> "dict[str, torch.Tensor]":
        """The named parameters, not to be changed."""
        import torch

        made = {}
        for name in names:
            shape = self._shapes[name]
            if len(shape) < 2:
                made[name] = torch.ones(*shape) if "norm" in name else torch.zeros(*shape)
                continue
            start = zlib.crc32(name.encode()) % _FEW
            made[name] = self._block[start : start + math.prod(shape)].view(*shape)
        return made
