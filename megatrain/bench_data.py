"""What is trained on while a step is measured: documents in memory, packed and batched as those of a run, without hub or tokenizer."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatrain.config import RunConfig
from megatrain.data import stdlib
from megatrain.data.cache import TokenCache
from megatrain.data.loader import Loader

if TYPE_CHECKING:
    import torch

_MEDIAN_TOKENS = 350
_SPREAD = 1.0  # of the logarithm of lengths
_MOST_PACKS = 2048  # more would only take memory


def synthetic(config: RunConfig, vocab_size: int) -> Loader:
    """Documents of log-normal lengths, cut at the sequence length, with tokens as frequent as words are (Zipf)."""
    length, rng = config.data.sequence_length, np.random.default_rng(0)
    wanted = length * min(_MOST_PACKS, 4 * config.packs_per_step)
    sizes: list[int] = []
    while sum(sizes) < wanted:
        sizes += np.clip(rng.lognormal(np.log(_MEDIAN_TOKENS), _SPREAD, 256).astype(np.int64), 8, length).tolist()
    ids = np.minimum(rng.zipf(1.2, sum(sizes)), vocab_size - 1)
    return _loader(np.split(ids, np.cumsum(sizes)[:-1]), config, "synthetic")


def library(config: RunConfig) -> Loader:
    """The functions of Python's standard library, a byte per token: text whose loss falls."""
    most = config.data.sequence_length - 1
    texts = (np.frombuffer(function.source.encode("utf-8")[:most], np.uint8) for function in stdlib.functions())
    return _loader([np.append(text.astype(np.int64) + 3, 2) for text in texts], config, "library")


def _loader(documents: Sequence[np.ndarray], config: RunConfig, name: str) -> Loader:
    ids = np.concatenate(documents).astype(np.uint32)
    offsets = np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype(np.int64)
    rows = np.arange(len(documents), dtype=np.int64)
    return Loader(TokenCache(Path(), ids, np.ones(len(ids), np.bool_), offsets, rows, {}, name), config, pad_id=0)


def noise(shapes: Mapping[str, Sequence[int]], names: Iterable[str]) -> "dict[str, torch.Tensor]":
    """Weights that cost no time to make: one block of small random numbers again and again, ones for norms. bf16 and fp32 tensors."""
    import torch

    block = (torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    made = {}
    for name in names:
        shape = shapes[name]
        count = int(np.prod(shape))
        if len(shape) < 2:
            made[name] = torch.ones(*shape) if "norm" in name else torch.zeros(*shape)
        else:
            made[name] = block.repeat(-(-count // len(block)))[:count].view(*shape)
    return made
