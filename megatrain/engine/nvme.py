"""The disk tier: one file with the homes of states that live on disk, and the host slots through which they are used.

A state on disk is read into a slot of host memory, used there like a state in RAM, and written back when it has changed.
Reads and writes are launched on lanes of their own, so the hand-over of slots orders them like every other memory. A
kind of state has a ring of slots (Plan.disk_slots), each as large as the largest block that keeps this kind on disk;
blocks take turns.

The file has no name and all of its space from the start (platform.open_scratch): a crashed run leaves nothing behind, and
a full disk is noticed before the first step. Requests are aligned, so that they pass the page cache where the system
allows direct I/O.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from megatrain import platform
from megatrain.engine.device import DISK_READ, DISK_WRITE, Buffer, Device
from megatrain.errors import TrainingError
from megatrain.models.tensorfile import disk_errors
from megatrain.units import format_bytes

REQUEST_BYTES = 16 << 20  # of one read or write: smaller ones cost bandwidth
_THREADS = 4  # requests in flight in each direction


class DiskState(Buffer):
    """The home of one state on disk: a range of the offload file. Its tensor, on the meta device, only says size and type."""

    def __init__(self, numel: int, dtype: torch.dtype, name: str, offset: int) -> None:
        super().__init__(torch.empty(numel, dtype=dtype, device="meta"), name)
        self.offset = offset


def disk_bytes(num_bytes: int) -> int:
    """What a state of `num_bytes` takes on disk, and in a slot."""
    alignment = platform.DIRECT_ALIGNMENT
    return -(-num_bytes // alignment) * alignment


class OffloadFile:
    """A nameless file of `num_bytes` in `folder`. Reads and writes whole aligned ranges, several requests at a time."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder = folder
        with disk_errors(folder, TrainingError):
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor, self.direct = platform.open_scratch(folder, num_bytes)
        self._pools = {lane: ThreadPoolExecutor(_THREADS, thread_name_prefix=lane) for lane in (DISK_READ, DISK_WRITE)}

    def read(self, offset: int, target: torch.Tensor) -> None:
        """Fill `target`: bytes, aligned in address and length."""
        self._requests(platform.read_at, DISK_READ, offset, target)

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Write `source`: bytes, aligned in address and length."""
        self._requests(platform.write_at, DISK_WRITE, offset, source)

    def close(self) -> None:
        """Give the space back to the system."""
        for pool in self._pools.values():
            pool.shutdown(wait=True)
        os.close(self._descriptor)

    def _requests(self, request: Callable[[int, memoryview, int], None], lane: str, offset: int, memory: torch.Tensor) -> None:
        view = memoryview(memory.numpy())
        with disk_errors(self.folder, TrainingError):
            waiting = [
                self._pools[lane].submit(request, self._descriptor, view[start : start + REQUEST_BYTES], offset + start)
                for start in range(0, len(view), REQUEST_BYTES)
            ]
            try:
                for one in waiting:
                    one.result()
            except EOFError as error:
                raise TrainingError(f"The offload file in {self.folder} became shorter than it was made.", "Check the disk.") from error


class _Slot:
    """Host memory for one state of one block at a time."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.block: int | None = None
        self.turn = 0


class DiskTier:
    """The states on disk of all blocks. `homes[name][block]` is a state's home, `rings[name]` the slots of its kind."""

    def __init__(self, folder: Path, homes: dict[str, dict[int, DiskState]], rings: dict[str, Sequence[Buffer]], device: Device) -> None:
        self._device = device
        self._homes = homes
        self._rings = {name: [_Slot(buffer) for buffer in ring] for name, ring in rings.items()}
        self._turn = 0
        states = [home for blocks in homes.values() for home in blocks.values()]
        self.num_bytes = max((home.offset + disk_bytes(home.tensor.nbytes) for home in states), default=0)
        self.file = OffloadFile(folder, self.num_bytes)  # of zeros

    def load(self, name: str, block: int, renew: bool = True) -> Buffer:
        """The host slot with this state, read if it is not there. `renew`: it will be needed as long as one read just now."""
        slot = self._find(name, block)
        if slot is None:
            slot = self._next(name, block)
            home = self._homes[name][block]
            part = _bytes_of(slot.buffer, home)
            self._device.move(DISK_READ, lambda: self.file.read(home.offset, part), len(part), slot.buffer, home)
        elif renew:
            self._renew(slot)
        return slot.buffer

    def target(self, name: str, block: int) -> Buffer:
        """A host slot that this state is to be written to, whole; `save` follows."""
        slot = self._find(name, block)
        if slot is None:
            return self._next(name, block).buffer
        self._renew(slot)
        return slot.buffer

    def save(self, name: str, block: int) -> None:
        """Write what was launched on the slot of this state to its home."""
        slot = self._find(name, block)
        if slot is None:
            raise RuntimeError(f"{name} of block {block} is in no slot")
        home = self._homes[name][block]
        part = _bytes_of(slot.buffer, home)
        self._device.move(DISK_WRITE, lambda: self.file.write(home.offset, part), len(part), home, slot.buffer)

    def release(self, lane: str, name: str, block: int) -> None:
        """This state is not needed in its slot any more. In the debug mode the slot is poisoned."""
        slot = self._find(name, block)
        if slot is not None and self._device.debug.poison:
            self._device.release(lane, slot.buffer)
            slot.block = None

    def get(self, name: str, block: int) -> torch.Tensor:
        """The state itself, in new memory. For between steps and for threads: nothing may be writing to this home."""
        home = self._homes[name][block]
        whole = aligned_bytes(disk_bytes(home.tensor.nbytes))
        self.file.read(home.offset, whole)
        return whole[: home.tensor.nbytes].view(home.tensor.dtype)

    def set(self, name: str, block: int, value: torch.Tensor) -> None:
        """Overwrite a state. Nothing may be reading or writing this home."""
        home, slot = self._homes[name][block], self._find(name, block)
        if slot is not None:  # what it holds is old
            slot.block = None
        whole = aligned_bytes(disk_bytes(home.tensor.nbytes))
        whole[: home.tensor.nbytes].view(home.tensor.dtype).copy_(value)
        self.file.write(home.offset, whole)

    def close(self) -> None:
        self.file.close()

    def __str__(self) -> str:
        return f"{format_bytes(self.num_bytes)} in {self.file.folder}"

    def _find(self, name: str, block: int) -> _Slot | None:
        return next((slot for slot in self._rings[name] if slot.block == block), None)

    def _next(self, name: str, block: int) -> _Slot:
        slot = min(self._rings[name], key=lambda slot: slot.turn if slot.block is not None else -1)
        slot.block = block
        self._renew(slot)
        return slot

    def _renew(self, slot: _Slot) -> None:
        self._turn += 1
        slot.turn = self._turn


def aligned_bytes(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8, zeroed, beginning where direct I/O may begin."""
    raw = torch.zeros(num_bytes + platform.DIRECT_ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % platform.DIRECT_ALIGNMENT
    return raw[start : start + num_bytes]


def _bytes_of(slot: Buffer, home: DiskState) -> torch.Tensor:
    return slot.tensor.view(torch.uint8)[: disk_bytes(home.tensor.nbytes)]
