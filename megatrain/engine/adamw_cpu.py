"""AdamW on the CPU in one visit per parameter: masters joined, updated and split again while they are in the cache.

Compiled by numba, which needs no compiler on the user's machine. Bound by memory: 26 bytes per parameter with split
masters and bf16 gradients, 28 in fp32. Threads of torch's number, each with pieces of its own; an element's result
depends on nothing but its own states, so neither pieces nor threads change a bit.
"""

import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

_CHUNK = 1 << 13  # elements: the scratch of one visit stays in the fastest cache
_PIECE = 1 << 18  # elements of one task at least: long against handing it over

log = logging.getLogger(__name__)


class States(NamedTuple):
    """n parameters and what belongs to them; contiguous, on one device."""

    params: torch.Tensor  # [n] fp32, or bf16 halves
    rests: torch.Tensor | None  # [n] int16 beside halves (see codecs)
    grads: torch.Tensor  # [n] bf16 or fp32, kept
    exp_avg: torch.Tensor  # [n] fp32
    exp_avg_sq: torch.Tensor  # [n] fp32


class Scalars(NamedTuple):
    """The numbers of one update, the same for every element."""

    clip: float  # factor of the gradient
    keep: float  # factor of the parameter: 1 - learning rate * weight decay
    rate1: float  # 1 - beta1
    beta2: float
    rate2: float  # 1 - beta2
    step_size: float  # learning rate / (1 - beta1^count)
    root: float  # sqrt(1 - beta2^count)
    eps: float


def update_range(states: States, scalars: Scalars) -> bool:
    """Update parameters on the CPU in place; False, with nothing done, where numba does not work."""
    kernel = _kernel()
    if kernel is None:
        return False
    params, rests, grads, exp_avg, exp_avg_sq = states
    nothing16, nothing32 = np.empty(0, np.int16), np.empty(0, np.float32)
    split, narrow = rests is not None, grads.dtype is torch.bfloat16
    arrays = (
        nothing32 if split else params.numpy(),
        params.view(torch.int16).numpy() if split else nothing16,
        nothing16 if rests is None else rests.numpy(),
        nothing32 if narrow else grads.numpy(),
        grads.view(torch.int16).numpy() if narrow else nothing16,
        exp_avg.numpy(),
        exp_avg_sq.numpy(),
    )
    numbers = tuple(np.float32(scalar) for scalar in scalars)

    threads = _num_threads()
    piece = _task_elements(len(exp_avg), threads)

    def work(first: int) -> None:
        kernel(*(array[first : first + piece] for array in arrays), split, narrow, *numbers)

    list(_pool(threads).map(work, range(0, len(exp_avg), piece)))
    return True


def prepare() -> None:
    """Load or compile the kernel now, some seconds, rather than at the first update."""
    _kernel()


def _task_elements(count: int, threads: int) -> int:
    """One task for each thread: every task is started by the interpreter, which the thread that feeds the GPU needs as well."""
    return max(_PIECE, _CHUNK * -(-count // (_CHUNK * threads)))


def _num_threads() -> int:
    """Those of torch; where a GPU is fed and there are many, one core stays free for the thread that does it."""
    threads = torch.get_num_threads()
    return threads - 1 if threads > 4 and torch.cuda.is_initialized() else threads


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    # moments of rows that are not hit again become denormal, which makes the processor ten times slower
    flush = functools.partial(torch.set_flush_denormal, True)
    return ThreadPoolExecutor(num_threads, thread_name_prefix="adamw", initializer=flush)


def _load_kernel() -> Callable[..., None] | None:
    """The compiled kernel, from numba's cache on disk where that is sound; None where numba does not work.

    It is run once here, on nothing: what numba reads, compiles and writes must not fail in the middle of an update.
    """
    try:
        import numba
    except (ImportError, OSError) as error:
        log.warning("updates on the CPU take several times longer: numba does not load (%s)", error)
        return None
    options: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}
    f, i = np.empty(0, np.float32), np.empty(0, np.int16)
    for cache in (True, False):  # a cache that is damaged, full or forbidden: compiled anew in every process
        try:
            kernel = numba.njit(cache=cache, **options)(_adamw)
            kernel(f, i, i, f, i, f, f, False, False, *[np.float32(1)] * 8)
        except Exception as error:  # whatever numba stumbles over, torch's operations do the same work
            log.warning("numba %s: %r", "cannot use its cache" if cache else "does not work, updates take several times longer", error)
        else:
            return kernel
    return None


_kernel = functools.cache(_load_kernel)


def _adamw(  # type: ignore[no-untyped-def]  # numba's types
    params, halves, rests, grads, grad_bits, exp_avg, exp_avg_sq, split, narrow,
    clip, keep, rate1, beta2, rate2, step_size, root, eps,
):  # fmt: skip
    scaled_step, scaled_eps = step_size * root, eps * root  # the correction of the second moment, without a division per element
    master_bits, gradient_bits = np.empty(_CHUNK, np.int32), np.empty(_CHUNK, np.int32)
    masters, gradients = master_bits.view(np.float32), gradient_bits.view(np.float32)
    for start in range(0, exp_avg.size, _CHUNK):
        first, second = exp_avg[start : start + _CHUNK], exp_avg_sq[start : start + _CHUNK]
        count = first.size
        # one short loop per conversion: each becomes vector instructions by itself
        if narrow:
            narrow_gradients = grad_bits[start : start + count]
            for i in range(count):
                gradient_bits[i] = np.int32(narrow_gradients[i]) << 16
            gradient = gradients[:count]
        else:
            gradient = grads[start : start + count]
        if split:
            half, rest = halves[start : start + count], rests[start : start + count]
            for i in range(count):
                master_bits[i] = (np.int32(half[i]) << 16) + np.int32(rest[i])
            param = masters[:count]
        else:
            param = params[start : start + count]
        for i in range(count):
            g = gradient[i] * clip
            m = first[i] + rate1 * (g - first[i])
            v = second[i] * beta2 + rate2 * g * g
            first[i], second[i] = m, v
            param[i] = param[i] * keep - scaled_step * m / (np.sqrt(v) + scaled_eps)
        if split:
            for i in range(count):
                high = (master_bits[i] + 0x8000) >> 16
                half[i] = high
                rest[i] = master_bits[i] - (high << 16)
