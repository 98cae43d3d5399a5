"""HiddenStore: the stored layer inputs of one group of micro-batches.

Boundary i is the input of layer i; boundary L the input of the head. In backward the gradient with respect to a boundary
takes the place of the boundary itself, so gradients need no memory of their own. Homes are in VRAM or in pinned RAM; in
RAM a pool of device buffers holds what is being worked on.
"""

import torch

from megatrain.engine.device import D2H, H2D, Buffer, Device
from megatrain.engine.tiers import StateStore
from megatrain.plan import Tier

POOL_SPARE = 4  # buffers beyond one per micro-batch: one being written, one being sent, two being fetched


def ram_pieces(num_layers: int, group: int, hidden_numel: int, dtype: torch.dtype) -> list[int]:
    """Bytes of the pinned homes when layer inputs are stored in RAM."""
    return [hidden_numel * dtype.itemsize] * (num_layers * group)


class HiddenStore:
    """Hidden states by (boundary, micro-batch of the group), each flat [hidden_numel] in the compute dtype."""

    def __init__(
        self, num_layers: int, group: int, hidden_numel: int, dtype: torch.dtype, tier: Tier, store: StateStore, device: Device
    ) -> None:
        self._device = device
        self._num_layers = num_layers
        self._in_ram = tier is not Tier.VRAM
        self._homes: dict[tuple[int, int], Buffer] = {}
        self._live: dict[tuple[int, int], Buffer] = {}
        keys = [(boundary, m) for boundary in range(num_layers + 1) for m in range(group)]
        if self._in_ram:
            for key in keys[: num_layers * group]:
                self._homes[key] = store.host_buffer(hidden_numel, dtype, f"stored input {key}", touched_by_copies=True)
            self._free = [device.empty(hidden_numel, dtype, f"hidden buffer {i}") for i in range(group + POOL_SPARE)]
        else:
            self._homes = {key: device.empty(hidden_numel, dtype, f"stored input {key}") for key in keys}
            self._free = []

    def write(self, boundary: int, m: int) -> Buffer:
        """The device buffer that this hidden state is to be written to."""
        buffer = self._free.pop(0) if self._in_ram else self._homes[boundary, m]
        self._live[boundary, m] = buffer
        return buffer

    def read(self, boundary: int, m: int) -> Buffer:
        """The device buffer that holds this hidden state (in backward: the gradient that took its place)."""
        return self._live[boundary, m]

    def store(self, boundary: int, m: int) -> None:
        """Keep what was written for backward."""
        if self._in_ram and boundary < self._num_layers:
            self._device.copy(D2H, self._homes[boundary, m], self._live[boundary, m])

    def fetch(self, boundary: int, m: int) -> None:
        """Bring a stored input back to the device, ahead of its use."""
        if self._in_ram and (boundary, m) not in self._live:
            self._device.copy(H2D, self.write(boundary, m), self._homes[boundary, m])

    def retire(self, lane: str, boundary: int, m: int) -> None:
        """Forward no longer needs this input on the device; its home keeps it for backward."""
        if self._in_ram:
            self.drop(lane, boundary, m)

    def drop(self, lane: str, boundary: int, m: int) -> None:
        """Nothing on the device needs this hidden state, or the gradient in its place, any more."""
        buffer = self._live.pop((boundary, m))
        self._device.release(lane, buffer)
        if self._in_ram:
            self._free.append(buffer)

    def clear(self) -> None:
        """Take every buffer back, as after an aborted step."""
        if self._in_ram:
            self._free += self._live.values()
        self._live.clear()
