"""Optimizer: when and where a block is updated.

`prepare` decides the update of a step and writes nothing; `update` carries it out for one block, just before the block's
weights are needed; `finish` for all that are left. Where a block is updated is the plan's choice (where its moments
live), so finishing early changes no bit. States that live elsewhere are brought to the updating side and sent back.
"""

import threading
from collections.abc import Callable, Mapping

import torch

from megatrain.engine.adamw import Update, update_block
from megatrain.engine.adamw_gpu import update_piece
from megatrain.engine.device import COMPUTE, D2H, DISK_WRITE, H2D, HOST, Buffer, Device
from megatrain.engine.slots import WeightCache
from megatrain.engine.tiers import BlockStates, StateStore
from megatrain.errors import TrainingError
from megatrain.models.compiler import Compiled, Compiler
from megatrain.plan import Tier

_STATES = ("masters", "grads", "exp_avg", "exp_avg_sq")  # the weights are handled apart: forward needs them too


class Optimizer:
    """Deferred AdamW over the blocks of a store."""

    def __init__(self, store: StateStore, cache: WeightCache, device: Device, compiler: Compiler, disk_slots: int = 0) -> None:
        self._store = store
        # updates that are launched before their block's turn: all, or as many as there are slots for states from disk
        self._ahead = max(1, disk_slots - 1) if store.disk is not None else len(store.blocks)
        self._cache = cache
        self._device = device
        self._fused = compiler.compiled(update_piece, dynamic=True, pure=False)
        self._update: Update | None = None
        self._pending: set[int] = set()
        self._launched: set[int] = set()
        self._broken = False
        self._gates: Mapping[int, threading.Event] = {}
        self._staging = {(name, on_device): self._staging_buffer(name, on_device) for name in _STATES for on_device in (True, False)}

    @property
    def pending(self) -> bool:
        """Whether some block still has to be updated."""
        return bool(self._pending)

    def prepare(self, update: Update) -> None:
        """Decide the update of every block. The last one must be finished."""
        if self._pending:
            raise RuntimeError("an update is decided while another is pending")
        self._update = update
        self._pending = set(range(len(self._store.blocks)))
        self._launched = set()

    def gate(self, gates: Mapping[int, threading.Event]) -> None:
        """The update of block b waits for gates[b]: somebody still reads its states."""
        self._gates = gates

    def start(self) -> None:
        """Put updates that the CPU does on the host lane, in the order in which forward needs the blocks, as far ahead as slots allow."""
        self._launch_until(self._ahead - 1)

    def update(self, index: int) -> None:
        """Afterwards what is launched on a block's weights sees them updated."""
        if index not in self._pending:
            return
        self._launch(index)
        self._launch_until(index + self._ahead)
        self._pending.discard(index)
        block = self._store.blocks[index]
        if not block.placement.updated_on_device:
            self._cache.stale(index)
            self._store.publish_weights(index)

    def finish(self) -> None:
        """Carry out whatever is pending and wait for it: every home holds finished states.

        TrainingError when an update broke off before: then no home can be trusted, and nothing may be saved.
        """
        if self._broken:
            raise TrainingError("An update broke off half-way: the states in memory are not whole.", "Resume from the last checkpoint.")
        for index in sorted(self._pending):
            self.update(index)
        self._device.synchronize()

    def _launch_until(self, last: int) -> None:
        for index in sorted(self._pending - self._launched):
            if index <= last and not self._store.blocks[index].placement.updated_on_device:
                self._launch(index)

    def _launch(self, index: int) -> None:
        if index in self._launched:
            return
        self._launched.add(index)
        self._broken = True  # until everything of this update is on its way
        self._launch_update(index)
        self._broken = False

    def _launch_update(self, index: int) -> None:
        block, update = self._store.blocks[index], self._update
        on_device = block.placement.updated_on_device
        states = {name: self._bring(index, name, on_device) for name in _STATES}
        weights = self._cache.acquire(index).buffer if on_device else self._store.in_host(index, "weights")
        gate = self._gates.get(index)
        if gate is not None and on_device:
            gate.wait()
            gate = None
        used = [weights, *(buffer for buffer in states.values() if buffer is not None)]
        lane = COMPUTE if on_device else HOST
        work = _work(block, weights, states, update, self._fused, gate)  # type: ignore[arg-type]
        self._device.launch(lane, work, writes=used, label=block.layout.name)
        for name, buffer in states.items():
            self._send_back(index, name, buffer, on_device)
        if on_device and weights is not block.weights:
            part = slice(0, block.layout.weight_bytes)
            home = self._store.host_target(index, "weights")
            self._device.copy(D2H, home, weights, target_part=part, source_part=part)
        self._store.keep(index, "weights")

    def _staging_buffer(self, name: str, on_device: bool) -> Buffer | None:
        """Room for one block's state on the side that updates it, if some block's home is on the other side."""
        updated_here = [block for block in self._store.blocks if block.placement.updated_on_device == on_device]
        elsewhere = [block.buffer(name) for block in updated_here if (block.tier(name) is Tier.VRAM) != on_device]
        visitors = [buffer.tensor for buffer in elsewhere if buffer is not None]
        if not visitors:
            return None
        largest = max(visitors, key=torch.Tensor.numel)
        label = f"staging of {name}"
        if on_device:
            return self._device.empty(largest.numel(), largest.dtype, label)
        return Buffer(torch.zeros(largest.numel(), dtype=largest.dtype), label)

    def _bring(self, index: int, name: str, on_device: bool) -> Buffer | None:
        """This state where its block is updated."""
        block = self._store.blocks[index]
        home = block.buffer(name)
        in_vram = block.tier(name) is Tier.VRAM
        if home is None or in_vram and on_device:
            return home
        source = home if in_vram else self._store.in_host(index, name)
        if in_vram == on_device:
            return source
        staging = self._staging[name, on_device]
        part = slice(0, home.tensor.numel())
        self._device.copy(H2D if on_device else D2H, staging, source, target_part=part, source_part=part)  # type: ignore[arg-type]
        return staging

    def _send_back(self, index: int, name: str, buffer: Buffer | None, on_device: bool) -> None:
        """Bring an updated state home (gradients are not needed again), and free the memory that it was in meanwhile."""
        block = self._store.blocks[index]
        home = block.buffer(name)
        if home is None or buffer is None or buffer is home:
            return
        in_vram, changed = block.tier(name) is Tier.VRAM, name != "grads"
        if in_vram != on_device:
            if changed:
                target = home if in_vram else self._store.host_target(index, name)
                part = slice(0, home.tensor.numel())
                self._device.copy(D2H if on_device else H2D, target, buffer, target_part=part, source_part=part)
            self._device.release(D2H if on_device else HOST, buffer)
        if changed:
            self._store.keep(index, name)
        self._store.release(DISK_WRITE if changed else HOST, index, name)


def _work(
    block: BlockStates,
    weights: Buffer,
    states: Mapping[str, Buffer | None],
    update: Update,
    fused: Compiled,
    gate: threading.Event | None,
) -> Callable[[], None]:
    layout = block.layout
    masters = states["masters"].tensor[: layout.numel_a] if states["masters"] is not None else None
    grads, exp_avg, exp_avg_sq = (states[name].tensor[: layout.numel] for name in ("grads", "exp_avg", "exp_avg_sq"))  # type: ignore[union-attr]

    def work() -> None:
        if gate is not None:
            gate.wait()
        update_block(layout, weights.tensor, masters, grads, exp_avg, exp_avg_sq, update, fused)

    return work
