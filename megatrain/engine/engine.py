"""Engine: one skeleton, its states and a device, put together as a plan says.

The trainer, the self-check and the tests all drive this one object.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatrain.activation_costs import loss_chunk_rows
from megatrain.config import RunConfig
from megatrain.data.batch import PackedBatch
from megatrain.engine import activations
from megatrain.engine.adamw import Update
from megatrain.engine.codecs import merge_master, split_master
from megatrain.engine.device import Device
from megatrain.engine.gradients import GradientFlow
from megatrain.engine.optimizer import Optimizer
from megatrain.engine.schedule import split_groups
from megatrain.engine.slots import WeightCache
from megatrain.engine.step import StepRunner
from megatrain.engine.tiers import MOMENTS, StateStore
from megatrain.models import attention
from megatrain.models.compiler import Compiler
from megatrain.models.skeleton import Skeleton
from megatrain.plan import Plan, Tier
from megatrain.precision import Precision

ReadTensors = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]


def gradient_dtype(config: RunConfig, precision: Precision) -> torch.dtype:
    """The type of parked gradients: configuration, never placement."""
    name = precision.default_gradient_dtype if config.gradient_dtype == "auto" else config.gradient_dtype
    return getattr(torch, name)


class Engine:
    """Trains and evaluates one model. Blocks are numbered as `layouts`.

    A training step is `train_step`, a look at the two numbers it returns, then `decide` (or nothing, which leaves every
    state as it was). `finish` before anything else reads the states.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        plan: Plan,
        precision: Precision,
        parked: torch.dtype,
        device: Device,
        packs_per_step: int,
        sequence_length: int,
        seed: int = 0,
        offload_folder: Path | None = None,
        compile_layers: bool = False,
    ) -> None:
        self.skeleton = skeleton
        self.layouts = skeleton.layouts
        self.device = device
        self.plan = plan
        config = skeleton.config.get_text_config()
        hidden_size = config.hidden_size if hasattr(config, "hidden_size") else config.n_embd
        num_layers = len(skeleton.layers)
        num_groups = len(split_groups(packs_per_step, plan.micro_batch_packs, plan.group_micro_batches))
        group = min(plan.group_micro_batches, -(-packs_per_step // plan.micro_batch_packs))
        hidden_numel = plan.micro_batch_packs * sequence_length * hidden_size
        dtype = skeleton.compute_dtype
        pinned = [layout.numel * 4 for layout in self.layouts] if num_groups > 1 and plan.accumulators_tier is not Tier.VRAM else []
        if plan.inputs_tier is not Tier.VRAM:
            pinned += activations.ram_pieces(num_layers, group, hidden_numel, dtype)
        skeleton.move_buffers(device.torch_device)
        attention.prepare_for(device.torch_device)
        self.store = StateStore(self.layouts, plan, precision, parked, device, pinned, offload_folder)
        cache = WeightCache(self.store, plan, skeleton.tied, device)
        gradients = GradientFlow(self.store, plan, skeleton.tied, num_groups, device)
        hidden = activations.HiddenStore(num_layers, group, hidden_numel, dtype, plan.inputs_tier, self.store, device)
        self.compiler = Compiler(compile_layers)
        self.optimizer = Optimizer(self.store, cache, device, self.compiler, plan.disk_slots)
        self._cache = cache
        chunk = loss_chunk_rows(config.vocab_size)
        cut = replace(plan, group_micro_batches=group)  # a held-out batch may have more packs than a step
        self._runner = StepRunner(skeleton, cache, gradients, hidden, self.optimizer, device, cut, hidden_size, chunk, seed, self.compiler)
        device.synchronize()

    # -- steps

    def train_step(self, batch: PackedBatch, step: int) -> tuple[float, float]:
        """(mean loss in nats, gradient norm) of one step; the gradients are parked, nothing is updated yet."""
        return self._runner.train_step(batch, step)

    def decide(self, update: Update) -> None:
        """Update every block with the parked gradients: each just before its next use, or in `finish`."""
        self.optimizer.prepare(update)

    def finish(self) -> None:
        """Carry out the pending update and wait: all homes hold finished states."""
        self.optimizer.finish()

    def evaluate(self, batches: Sequence[PackedBatch]) -> tuple[float, int]:
        """(mean loss in nats, trained tokens) of finished weights over held-out batches."""
        self.finish()
        return self._runner.evaluate(batches)

    def close(self) -> None:
        self.device.close()
        self.store.close()

    # -- states in and out

    def load_weights(self, read: ReadTensors, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Fill the weights (and exact masters) of every block from `read(names)`; moments become zero."""
        room = torch.empty(max(layout.weight_bytes for layout in self.layouts), dtype=torch.uint8)  # once: new memory is slow
        rests = torch.empty(max(layout.numel_a for layout in self.layouts), dtype=torch.int16)
        for index, layout in enumerate(self.layouts):
            tensors = read([entry.name for entry in (*layout.entries, *layout.buffers) if getattr(entry, "persistent", True)])
            self._set_weights(index, tensors, room[: layout.weight_bytes].zero_(), rests[: layout.numel_a].zero_())
            progress(index + 1, len(self.layouts))

    def _set_weights(self, index: int, tensors: Mapping[str, torch.Tensor], flat: torch.Tensor, rest: torch.Tensor) -> None:
        """Overwrite a block's weights and masters. `flat`, `rest`: zeroed host memory for both on their way."""
        layout, block = self.layouts[index], self.store.blocks[index]
        views = layout.weight_views(flat)
        for entry in layout.entries:
            value = tensors[entry.name].reshape(-1)
            if entry.segment == "a" and block.masters is not None and value.dtype is not torch.bfloat16:
                place = slice(entry.offset, entry.offset + entry.numel)
                split_master(value.float().contiguous(), layout.segment_a(flat)[place], rest[place])
            else:
                views[entry.name].view(-1).copy_(value)
        module_buffers = self.skeleton_buffers(index)
        for buffer in layout.buffers:
            views[buffer.name].copy_(tensors[buffer.name] if buffer.name in tensors else module_buffers[buffer.name])
        states = {"weights": flat}
        if block.masters is not None:
            states["masters"] = rest
        self.write_block(index, states)

    def skeleton_buffers(self, index: int) -> dict[str, torch.Tensor]:
        """The buffers of a layer as the model's own code builds them: no file contains those that are not persistent."""
        if index in (0, len(self.layouts) - 1):
            return {}
        prefix = f"{self.skeleton.layer_path}.{index - 1}."
        return {prefix + name: buffer for name, buffer in self.skeleton.layers[index - 1].named_buffers()}

    def read_block(self, index: int) -> dict[str, torch.Tensor]:
        """The states of a block on the CPU: weights (uint8), masters, exp_avg, exp_avg_sq. Finished, and not to be changed.

        States that live in RAM are returned as they are, without copying.
        """
        found = {name: self.store.get(index, name) for name in ("weights", "masters", *MOMENTS)}
        return {name: state for name, state in found.items() if state is not None}

    def write_block(self, index: int, states: Mapping[str, torch.Tensor]) -> None:
        """Overwrite states of a block, named as `read_block` names them. Nothing may be pending."""
        self.device.synchronize()
        for name, value in states.items():
            self.store.set(index, name, value)
        self.device.synchronize()  # these copies are on no lane
        self._cache.stale(index)

    def master_weights(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Exact fp32 masters by parameter name, on the CPU."""
        wanted = None if names is None else set(names)
        masters: dict[str, torch.Tensor] = {}
        for index, layout in enumerate(self.layouts):
            if wanted is not None and not any(entry.name in wanted for entry in layout.entries):
                continue
            states = self.read_block(index)
            half = layout.segment_a(states["weights"])
            exact = merge_master(half, states["masters"]) if "masters" in states else half
            for entry in layout.entries:
                flat = exact if entry.segment == "a" else layout.segment_b(states["weights"])
                masters[entry.name] = flat[entry.offset : entry.offset + entry.numel].view(entry.shape).clone()
        return masters

    def parked_gradients(self) -> dict[str, torch.Tensor]:
        """The parked gradients of the last step by parameter name, fp32 on the CPU."""
        self.device.synchronize()
        found: dict[str, torch.Tensor] = {}
        for index, layout in enumerate(self.layouts):
            gradient = self.store.get(index, "grads")
            found |= {name: view.clone() for name, view in layout.flat_views(gradient.float()).items()}  # type: ignore[union-attr]
        return found
