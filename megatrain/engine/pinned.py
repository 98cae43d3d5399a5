"""Host memory of exact size, pinned where the copy engines touch it.

`torch.empty(pin_memory=True)` rounds up to a power of two in several versions; here one arena is mapped, touched in
parallel and registered in pieces. Where the system refuses (Windows and WSL often do) the memory stays pageable: the
same work, slower.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import torch

_PIECE_BYTES = 1 << 30
_ALIGN = 4096
_THREADS = 4


class HostArena:
    """One allocation of host memory, handed out piece by piece and never grown.

    `pinned` says whether the system granted pinned memory; `refusal` why not.
    """

    def __init__(self, num_bytes: int, pin: bool) -> None:
        self.num_bytes = num_bytes
        self.pinned = False
        self.refusal = ""
        raw = torch.empty(num_bytes + _ALIGN, dtype=torch.uint8)
        start = -raw.data_ptr() % _ALIGN
        self._memory = raw[start : start + num_bytes]
        self._used = 0
        self._registered: list[int] = []
        if num_bytes:
            self._touch()
            if pin:
                self._register()

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """The next piece of the arena, page-aligned. MemoryError when it was sized too small."""
        num_bytes = num_elements * dtype.itemsize
        if self._used + num_bytes > self.num_bytes:
            raise MemoryError(f"host arena of {self.num_bytes} bytes is exhausted")
        piece = self._memory[self._used : self._used + num_bytes].view(dtype)
        self._used += arena_bytes(num_bytes)
        return piece

    def close(self) -> None:
        """Give the pinned pages back to the system."""
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered = []

    def _pieces(self) -> list[torch.Tensor]:
        return list(self._memory.split(_PIECE_BYTES))

    def _touch(self) -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda piece: piece.zero_(), self._pieces()))

    def _register(self) -> None:
        runtime = torch.cuda.cudart()

        def register(piece: torch.Tensor) -> int:
            return int(runtime.cudaHostRegister(piece.data_ptr(), piece.numel(), 0))

        pieces = self._pieces()
        with ThreadPoolExecutor(_THREADS) as pool:
            codes = list(pool.map(register, pieces))
        self._registered = [piece.data_ptr() for piece, code in zip(pieces, codes, strict=True) if code == 0]
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
