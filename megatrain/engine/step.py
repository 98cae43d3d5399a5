"""StepRunner: carries the schedule's operations out on a device.

P packs of S tokens per micro-batch, D hidden size, L layers. Every piece of device work is a closure launched with the
buffers it reads and writes; nothing here waits, except for the two numbers that a step ends with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from megatrain.data.batch import IGNORE_INDEX, PackedBatch
from megatrain.engine.activations import HiddenStore
from megatrain.engine.device import COMPUTE, Buffer, Device
from megatrain.engine.gradients import GradientFlow
from megatrain.engine.optimizer import Optimizer
from megatrain.engine.schedule import Do, Op, forward_ops, split_groups, step_ops
from megatrain.engine.slots import BoundWeights, WeightCache
from megatrain.models.attention import document_boundaries
from megatrain.models.compiler import Compiler
from megatrain.models.loss import ChunkedLoss
from megatrain.models.skeleton import Recording, Skeleton
from megatrain.models.template import LayerCall, Template
from megatrain.plan import Plan

_UNSET = torch.empty(0)


@dataclass
class MicroBatch:
    """One micro-batch on the device, and what its forward pass leaves for backward."""

    packs: int
    length: int
    number: int  # in the step: dropout draws from it
    input_ids: torch.Tensor = _UNSET  # [P, S] int64
    position_ids: torch.Tensor = _UNSET  # [P, S] int64
    labels: torch.Tensor = _UNSET  # [P * S] int64
    rows: torch.Tensor = _UNSET  # [R] int64: positions with a label
    boundaries: torch.Tensor = _UNSET  # [N + 1] int32: where documents begin
    calls: list[LayerCall] = field(default_factory=list)
    extras: list[torch.Tensor] = field(default_factory=list)  # tensors besides hidden states that carry gradient
    extra_grads: list[torch.Tensor | None] = field(default_factory=list)


class StepRunner:
    """Runs training steps and evaluations of one skeleton on one device."""

    def __init__(
        self,
        skeleton: Skeleton,
        cache: WeightCache,
        gradients: GradientFlow,
        hidden: HiddenStore,
        optimizer: Optimizer,
        device: Device,
        plan: Plan,
        hidden_size: int,
        loss_chunk_rows: int,
        seed: int,
        compiler: Compiler,
    ) -> None:
        self._skeleton = skeleton
        self._cache = cache
        self._gradients = gradients
        self._hidden = hidden
        self._optimizer = optimizer
        self._device = device
        self._plan = plan
        self._hidden_size = hidden_size
        self._loss = ChunkedLoss(skeleton.logits, loss_chunk_rows, compiler)
        self._seed = seed
        self._num_layers = len(skeleton.layers)
        self._templates = self._make_templates(compiler)
        self._loss_sum = device.empty(1, torch.float64, "loss sum")
        self._both = device.empty(2, torch.float64, "loss and norm")
        self._result = Buffer(torch.zeros(2, dtype=torch.float64, pin_memory=device.torch_device.type == "cuda"), "loss and norm")
        self._micro_batches: list[MicroBatch] = []
        self._step = 0
        self._training = True
        self._first_group = self._last_group = True
        self._scale = 1.0
        self._handlers: dict[Do, Callable[[Op], None]] = {
            Do.UPDATE: lambda op: self._optimizer.update(op.block),
            Do.LOAD: lambda op: self._load(op.block),
            Do.PREFETCH: lambda op: self._cache.prefetch(op.block),
            Do.EMBED: self._embed,
            Do.LAYER: self._layer,
            Do.HEAD: self._head,
            Do.OPEN: lambda op: self._open(op.block),
            Do.FETCH: lambda op: self._hidden.fetch(op.block - 1, op.m),
            Do.LAYER_BACKWARD: self._layer_backward,
            Do.EMBED_BACKWARD: self._embed_backward,
            Do.CLOSE: lambda op: self._gradients.close(op.block, self._last_group),
        }

    # -- whole steps

    def train_step(self, batch: PackedBatch, step: int) -> tuple[float, float]:
        """(mean loss over the step's trained tokens in nats, global gradient norm); gradients are parked afterwards.

        The pending update of the step before is carried out block by block on the way. `step` counts from 0.
        """
        self._step, self._training = step, True
        self._scale = 1.0 / batch.trained_tokens
        self._set_mode()
        groups = split_groups(batch.num_packs, self._plan.micro_batch_packs, self._plan.group_micro_batches)
        self._gradients.start_step()
        self._device.launch(COMPUTE, self._loss_sum.tensor.zero_, writes=[self._loss_sum])
        self._optimizer.start()
        started = -1
        for group, op in step_ops(self._num_layers, groups, self._skeleton.tied):
            if group != started:
                started = group
                self._first_group, self._last_group = group == 0, group == len(groups) - 1
                self._start_group(batch, groups[group], sum(map(len, groups[:group])))
            if self._device.timeline is not None:
                self._device.timeline.begin(op.do, op.block, op.m)
            self._handlers[op.do](op)
        loss_sum, square_sum = self._read_result()
        return loss_sum / batch.trained_tokens, square_sum**0.5

    def evaluate(self, batches: Sequence[PackedBatch]) -> tuple[float, int]:
        """(mean loss over the trained tokens in nats, trained tokens). No update may be pending."""
        self._training = False
        self._set_mode()
        self._device.launch(COMPUTE, self._loss_sum.tensor.zero_, writes=[self._loss_sum])
        self._gradients.start_step()
        tokens = 0
        for batch in batches:
            for group in split_groups(batch.num_packs, self._plan.micro_batch_packs, self._plan.group_micro_batches):
                self._start_group(batch, group, 0)
                for op in forward_ops(self._num_layers, range(len(group)), self._skeleton.tied, update=False, keep=False):
                    self._handlers[op.do](op)
            tokens += batch.trained_tokens
        loss_sum, _ = self._read_result()
        return loss_sum / max(tokens, 1), tokens

    def _start_group(self, batch: PackedBatch, group: Sequence[tuple[int, int]], first_number: int) -> None:
        self._hidden.clear()
        parts = [batch.packs(*packs) for packs in group]
        self._micro_batches = [self._upload(part, first_number + i) for i, part in enumerate(parts)]

    def _upload(self, part: PackedBatch, number: int) -> MicroBatch:
        labels = part.labels.reshape(-1)
        micro_batch = MicroBatch(*part.input_ids.shape, number=number)
        arrays = {"input_ids": part.input_ids, "position_ids": part.position_ids, "labels": labels}
        arrays["rows"] = np.flatnonzero(labels != IGNORE_INDEX)
        arrays["boundaries"] = document_boundaries(part.position_ids)

        def work() -> None:
            for name, array in arrays.items():
                setattr(micro_batch, name, torch.tensor(array, device=self._device.torch_device))  # copies: a file may be mapped

        self._device.launch(COMPUTE, work)
        return micro_batch

    def _read_result(self) -> tuple[float, float]:
        both, sources = self._both, (self._loss_sum, self._gradients.square_sum)
        self._device.launch(COMPUTE, lambda: _join(both.tensor, *(s.tensor for s in sources)), reads=sources, writes=[both])
        # not on the lane of the gradients: the last of them need not be home
        result = self._result
        done = self._device.launch(COMPUTE, lambda: result.tensor.copy_(both.tensor, non_blocking=True), reads=[both], writes=[result])
        self._device.wait(done, "gpu")
        return float(self._result.tensor[0]), float(self._result.tensor[1])

    def _set_mode(self) -> None:
        self._skeleton.model.train(self._training)
        for template in self._templates.values():
            template.module.train(self._training)

    def _make_templates(self, compiler: Compiler) -> dict[str, Template]:
        templates: dict[str, Template] = {}
        for layer, layout in zip(self._skeleton.layers, self._skeleton.layouts[1:-1], strict=True):
            if layout.kind not in templates:
                templates[layout.kind] = Template(layer, compiler)
        return templates

    # -- operations

    def _load(self, block: int) -> BoundWeights:
        weights = self._cache.acquire(block)
        if self._skeleton.tied and block == self._num_layers + 1:
            self._cache.acquire(0)
        return weights

    def _open(self, block: int) -> Buffer:
        return self._gradients.open(block, self._first_group)

    def _embed(self, op: Op) -> None:
        micro_batch, weights = self._micro_batches[op.m], self._cache.acquire(0)
        target = self._hidden.write(0, op.m)

        def work() -> None:
            self._reseed(0, micro_batch)
            with torch.set_grad_enabled(self._training), self._skeleton.bound(weights.params, head=False):
                recording = self._skeleton.record(micro_batch.input_ids, micro_batch.position_ids, micro_batch.boundaries)
            micro_batch.extras = [t.detach() for t in carrying_gradient(recording)]
            micro_batch.extra_grads = [None] * len(micro_batch.extras)
            replaced = {id(old): new for old, new in zip(carrying_gradient(recording), micro_batch.extras, strict=True)}
            micro_batch.calls = [
                LayerCall(replace(c.args, replaced), replace(c.kwargs, replaced), c.hidden_keyword) for c in recording.calls
            ]
            hidden = recording.hidden.detach()
            self._view(target, micro_batch).copy_(hidden)

        self._device.launch(COMPUTE, work, reads=[weights.buffer], writes=[target])
        if self._training:
            self._hidden.store(0, op.m)
        self._release_after_last(op)

    def _layer(self, op: Op) -> None:
        micro_batch, weights = self._micro_batches[op.m], self._cache.acquire(op.block)
        source, target = self._hidden.read(op.block - 1, op.m), self._hidden.write(op.block, op.m)

        def work() -> None:
            self._reseed(op.block, micro_batch)
            views, call = self._inside(op.block, weights.params), micro_batch.calls[op.block - 1]
            output = self._template(op.block).forward(views, op.block - 1, call, self._view(source, micro_batch))
            self._view(target, micro_batch).copy_(output)

        self._device.launch(COMPUTE, work, reads=[weights.buffer, source], writes=[target])
        if self._training:
            self._hidden.store(op.block, op.m)
        self._hidden.retire(COMPUTE, op.block - 1, op.m)
        self._release_after_last(op)

    def _head(self, op: Op) -> None:
        micro_batch, hidden = self._micro_batches[op.m], self._hidden.read(self._num_layers, op.m)
        head_block = self._num_layers + 1
        blocks = [0, head_block] if self._skeleton.tied else [head_block]
        bound = [self._cache.acquire(block) for block in blocks]
        params = {name: p for weights in bound for name, p in weights.params.items() if name in self._skeleton.head_names}
        reads = [weights.buffer for weights in bound]

        def evaluate() -> None:
            with self._skeleton.bound(params, head=True):
                flat = self._view(hidden, micro_batch).reshape(-1, self._hidden_size)
                rows, labels = micro_batch.rows, micro_batch.labels
                self._loss_sum.tensor.add_(self._loss.evaluate(flat, labels, rows))

        if not self._training:
            self._device.launch(COMPUTE, evaluate, reads=[*reads, hidden], writes=[self._loss_sum])
            self._release_after_last(op)
            return
        accumulators = [self._open(block) for block in blocks]
        views = {name: view for block in blocks for name, view in self._gradients.views(block).items()}

        def train() -> None:
            flat = self._view(hidden, micro_batch).reshape(-1, self._hidden_size)
            hidden_grad = torch.empty_like(flat)
            with self._skeleton.bound(params, head=True):
                sums = [views[name] for name in params]
                labels, rows = micro_batch.labels, micro_batch.rows
                loss = self._loss.backward(flat, labels, rows, self._scale, list(params.values()), sums, hidden_grad)
            self._loss_sum.tensor.add_(loss)
            flat.copy_(hidden_grad)

        self._device.launch(COMPUTE, train, reads=reads, writes=[hidden, self._loss_sum, *accumulators])
        self._release_after_last(op)

    def _layer_backward(self, op: Op) -> None:
        micro_batch, weights = self._micro_batches[op.m], self._cache.acquire(op.block)
        source, gradient = self._hidden.read(op.block - 1, op.m), self._hidden.read(op.block, op.m)
        accumulator = self._open(op.block)
        sums = self._gradients.views(op.block)

        def work() -> None:
            hidden = self._view(source, micro_batch).detach().requires_grad_()
            leaves = {id(t): t.detach().requires_grad_() for t in micro_batch.extras}
            call = micro_batch.calls[op.block - 1]
            call = LayerCall(replace(call.args, leaves), replace(call.kwargs, leaves), call.hidden_keyword)
            others = [*(weights.params[name] for name in sums), *leaves.values()]
            self._reseed(op.block, micro_batch)
            found = self._template(op.block).backward(
                self._inside(op.block, weights.params), op.block - 1, call, hidden, others, self._view(gradient, micro_batch)
            )
            for total, new in zip(sums.values(), found[1:], strict=False):
                if new is not None:
                    total.add_(new)
            for number, new in enumerate(found[1 + len(sums) :]):
                if new is not None:
                    so_far = micro_batch.extra_grads[number]
                    micro_batch.extra_grads[number] = new if so_far is None else so_far + new
            self._view(source, micro_batch).copy_(found[0])

        self._device.launch(COMPUTE, work, reads=[weights.buffer, gradient], writes=[source, accumulator])
        self._hidden.drop(COMPUTE, op.block, op.m)
        self._release_after_last(op)

    def _embed_backward(self, op: Op) -> None:
        micro_batch, weights = self._micro_batches[op.m], self._cache.acquire(0)
        gradient, accumulator = self._hidden.read(0, op.m), self._open(0)
        views = self._gradients.views(0)
        names = self._skeleton.embed_names

        def work() -> None:
            self._reseed(0, micro_batch)
            with torch.enable_grad(), self._skeleton.bound(weights.params, head=False):
                recording = self._skeleton.record(micro_batch.input_ids, micro_batch.position_ids, micro_batch.boundaries)
                roots, grads = [recording.hidden], [self._view(gradient, micro_batch)]
                for root, grad in zip(carrying_gradient(recording), micro_batch.extra_grads, strict=True):
                    if grad is not None:
                        roots.append(root)
                        grads.append(grad)
                found = torch.autograd.grad(roots, [weights.params[name] for name in names], grads, allow_unused=True)
            for name, new in zip(names, found, strict=True):
                if new is not None:
                    views[name].add_(new)

        self._device.launch(COMPUTE, work, reads=[weights.buffer, gradient], writes=[accumulator])
        self._hidden.drop(COMPUTE, 0, op.m)
        self._release_after_last(op)

    def _release_after_last(self, op: Op) -> None:
        """When the last micro-batch has passed a block, its slots may be written again."""
        if op.m == len(self._micro_batches) - 1:
            self._cache.release(COMPUTE, op.block)
            if self._skeleton.tied and op.do is Do.HEAD:
                self._cache.release(COMPUTE, 0)

    # -- pieces of work, run inside launches

    def _view(self, buffer: Buffer, micro_batch: MicroBatch) -> torch.Tensor:
        """[P, S, D] view of a flat hidden buffer."""
        packs, length = micro_batch.packs, micro_batch.length
        return buffer.tensor[: packs * length * self._hidden_size].view(packs, length, self._hidden_size)

    def _template(self, block: int) -> Template:
        return self._templates[self._skeleton.layouts[block].kind]

    def _inside(self, block: int, params: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Parameters and buffers by their names inside the layer."""
        prefix = f"{self._skeleton.layer_path}.{block - 1}."
        return {name.removeprefix(prefix): param for name, param in params.items()}

    def _reseed(self, block: int, micro_batch: MicroBatch) -> None:
        """Dropout's noise depends on what is computed, not on when: recomputing draws the same again."""
        if self._training:
            value = ((self._seed * 1_000_003 + self._step) * 4_099 + block) * 65_537 + micro_batch.number
            self._device.seed(value & 0x7FFF_FFFF_FFFF_FFFF)


def carrying_gradient(recording: Recording) -> list[torch.Tensor]:
    """The tensors among the layers' arguments that carry gradient, each once, in the order of the calls."""
    found: dict[int, torch.Tensor] = {}
    stack: list[Any] = [(call.args, call.kwargs) for call in reversed(recording.calls)]
    while stack:
        value = stack.pop()
        if torch.is_tensor(value):
            if value.requires_grad and not isinstance(value, nn.Parameter):
                found[id(value)] = value
        elif isinstance(value, dict):
            stack += reversed(list(value.values()))
        elif isinstance(value, (tuple, list)):
            stack += reversed(value)
    return list(found.values())


def replace(value: Any, by_id: dict[int, torch.Tensor]) -> Any:
    """`value` with some of its tensors, however nested, exchanged."""
    if not by_id:
        return value
    if torch.is_tensor(value):
        return by_id.get(id(value), value)
    if isinstance(value, dict):
        return {key: replace(item, by_id) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(replace(item, by_id) for item in value)
    return value


def _join(target: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    target[0:1].copy_(first)
    target[1:2].copy_(second)
