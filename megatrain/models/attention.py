"""Attention over packed documents, registered with transformers: no mask is kept, only where documents begin.

Models whose attention is causal, plain or windowed, get it; `Skeleton` checks that. On a GPU in half precision it is
`torch.nn.attention.varlen` (flash attention over documents of different lengths) if it can be, elsewhere SDPA under a mask
that is made for each call. P: packs, S: tokens of a pack, H: heads, E: head size, N: room for documents.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PACKED = "megatrain_packed"  # the name under which transformers knows it
LARGEST_HEAD = 256  # of the flash kernels
_ROOM_PER_PACK = 8  # documents that a pack has room for at least, so that most batches need equal room
_NO_MATTER = {"position_ids", "cache_position"}  # of what layers hand to attention: rotation is done before
_GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class LayerSeen(Exception):  # noqa: N818  # nothing went wrong
    """Raised inside `watching_layers` instead of computing attention."""


class AttentionCall(NamedTuple):
    """What attention was called with."""

    mask: torch.Tensor
    window: int | None
    head_size: int
    value_size: int
    more: frozenset[str]  # what may change scores besides: soft-caps, sinks, biases, ...


class _Current:
    """What the model's own forward is recorded with: transformers hands nothing of ours through it."""

    flash: bool = True  # the GPU in use has kernels for documents of different lengths
    boundaries: torch.Tensor | None = None
    masks: list[tuple[torch.Tensor, int | None]]  # (what a mask function returned, its window)
    calls: list[AttentionCall] | None = None


def prepare_for(device: torch.device) -> None:
    """Choose the kernel for a GPU before it is used: older ones than Ampere, and some builds of torch, have no flash attention."""
    if device.type == "cuda":
        _Current.flash = torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def document_boundaries(position_ids: np.ndarray) -> np.ndarray:
    """[N + 1] int32: where each document begins in the flattened packs, then the number of tokens, repeated.

    position_ids: [P, S], restarting at 0 with each document; none reaches into the next pack. N is a power of two, so
    that kernels compiled for one batch fit most others.
    """
    begins = position_ids == 0
    begins[:, 0] = True
    starts = np.flatnonzero(begins)
    room = 1 << (max(len(starts), _ROOM_PER_PACK * len(position_ids)) - 1).bit_length()
    found = np.full(room + 1, position_ids.size, np.int32)
    found[: len(starts)] = starts
    return found


@contextlib.contextmanager
def recording_with(boundaries: torch.Tensor) -> Iterator[list[tuple[torch.Tensor, int | None]]]:
    """Inside, a model's mask functions return `boundaries`; yields (what each returned, the window it meant)."""
    _Current.boundaries, _Current.masks = boundaries, []
    try:
        yield _Current.masks
    finally:
        _Current.boundaries = None


@contextlib.contextmanager
def watching_layers() -> Iterator[list[AttentionCall]]:
    """Inside, a layer is run up to its attention; yields what attention was called with."""
    _Current.calls = calls = []
    try:
        yield calls
    finally:
        _Current.calls = None


def packed_mask(
    *, local_size: int | None = None, use_vmap: bool = False, attention_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """Stands in for transformers' mask functions. NotImplementedError for masks that are more than documents and a window."""
    if _Current.boundaries is None or use_vmap or attention_mask is not None:
        raise NotImplementedError("a mask that boundaries of documents cannot describe")
    found = _Current.boundaries.view(-1)  # a tensor of its own: layers say by it which mask they got
    _Current.masks.append((found, local_size))
    return found


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """[P, S, H, E] causal attention inside documents. query: [P, H, S, E]; key, value may have fewer heads.

    attention_mask: boundaries as `document_boundaries` gives them, on the query's device.
    sliding_window: tokens that a query sees, itself included.
    """
    packs, heads, length, size = query.shape
    if _Current.calls is not None:
        _Current.calls.append(AttentionCall(attention_mask, sliding_window, size, value.shape[-1], _more(more)))
        raise LayerSeen
    if _Current.flash and query.is_cuda and query.dtype is not torch.float32 and not dropout:
        padded = F.pad(value, (0, size - value.shape[-1])) if value.shape[-1] < size else value  # multi-head latent attention
        flat = (tensor.transpose(1, 2).reshape(packs * length, -1, size) for tensor in (query, key, padded))
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        found = varlen_attn(*flat, attention_mask, attention_mask, length, length, scale=scaling, window_size=window, **_GQA)
        return found.view(packs, length, heads, size)[..., : value.shape[-1]], None
    mask = visible(attention_mask, packs, length, sliding_window)
    found = F.scaled_dot_product_attention(query, _repeated(key, heads), _repeated(value, heads), mask, dropout, scale=scaling)
    return found.transpose(1, 2), None


def _more(handed: dict[str, Any]) -> frozenset[str]:
    """Names of what may change what attention computes: all but what is off."""
    off = {"is_causal": True}
    return frozenset(name for name, value in handed.items() if not (value is None or value is off.get(name, False) or name in _NO_MATTER))


def _repeated(states: torch.Tensor, heads: int) -> torch.Tensor:
    """[P, H, S, E] from fewer heads: fused kernels that take a mask want as many as the query has."""
    packs, own, length, size = states.shape
    return states if own == heads else states[:, :, None].expand(packs, own, heads // own, length, size).reshape(packs, heads, length, size)


def visible(boundaries: torch.Tensor, packs: int, length: int, window: int | None) -> torch.Tensor:
    """[P, 1, S, S] bool: what each query sees."""
    place = torch.arange(packs * length, dtype=torch.int32, device=boundaries.device)
    document = torch.searchsorted(boundaries, place, right=True).view(packs, length)
    distance = place[:length, None] - place[None, :length]
    seen = (document[:, :, None] == document[:, None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    return seen[:, None]


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, packed_mask)
