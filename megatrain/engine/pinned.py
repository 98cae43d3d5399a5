"""Host memory of exact size, pinned where the copy engines touch it.

`torch.empty(pin_memory=True)` rounds up to a power of two in several versions; here one arena is mapped, touched in
parallel and registered in ranges. Where the system refuses (Windows and WSL often do) the memory stays pageable: the
same work, slower.
"""

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

_RANGE_BYTES = 1 << 30
_ALIGN = 4096
_THREADS = 4


class HostArena:
    """One allocation of host memory for pieces of `sizes` bytes, handed out in that order and never grown.

    `pinned` says whether the system granted pinned memory; `refusal` why not.
    """

    def __init__(self, sizes: Sequence[int], pin: bool) -> None:
        self._sizes = list(sizes)
        self.num_bytes = sum(map(arena_bytes, self._sizes))
        self.pinned = False
        self.refusal = ""
        raw = torch.empty(self.num_bytes + _ALIGN, dtype=torch.uint8)
        start = -raw.data_ptr() % _ALIGN
        self._memory = raw[start : start + self.num_bytes]
        self._taken = 0
        self._used = 0
        self._registered: list[int] = []
        if self.num_bytes:
            self._touch()
            if pin:
                self._register()

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """The next piece, page-aligned and zeroed. MemoryError when it is not the one that was announced."""
        num_bytes = num_elements * dtype.itemsize
        if self._taken == len(self._sizes) or self._sizes[self._taken] != num_bytes:
            raise MemoryError(f"piece {self._taken} of the host arena was announced otherwise than with {num_bytes} bytes")
        piece = self._memory[self._used : self._used + num_bytes].view(dtype)
        self._taken += 1
        self._used += arena_bytes(num_bytes)
        return piece

    def close(self) -> None:
        """Give the pinned pages back to the system."""
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered = []

    def _ranges(self) -> list[torch.Tensor]:
        """The arena in ranges of whole pieces: a copy may not cross the border of two registrations."""
        lengths: list[int] = []
        for size in map(arena_bytes, self._sizes):
            if lengths and lengths[-1] + size <= _RANGE_BYTES:
                lengths[-1] += size
            else:
                lengths.append(size)
        return [part for part in self._memory.split(lengths) if part.numel()]

    def _touch(self) -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(torch.Tensor.zero_, self._memory.split(_RANGE_BYTES)))

    def _register(self) -> None:
        runtime = torch.cuda.cudart()

        def register(part: torch.Tensor) -> int:
            return int(runtime.cudaHostRegister(part.data_ptr(), part.numel(), 0))

        parts = self._ranges()
        with ThreadPoolExecutor(_THREADS) as pool:
            codes = list(pool.map(register, parts))
        self._registered = [part.data_ptr() for part, code in zip(parts, codes, strict=True) if code == 0]
        failed = [code for code in codes if code]
        if failed:
            self.refusal = f"The system refused pinned memory (CUDA error {failed[0]}); copies will be slower."
            self.close()
            with contextlib.suppress(RuntimeError):  # the refusal stays as CUDA's last error until some call reports it
                torch.zeros(1, device="cuda")
        else:
            self.pinned = True


def arena_bytes(num_bytes: int) -> int:
    """What one piece takes of an arena."""
    return -(-num_bytes // _ALIGN) * _ALIGN
