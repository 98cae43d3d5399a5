"""The update of a flat block is torch's AdamW, decay only where it belongs: its bits in operations, its rounding in the kernel."""

import logging
import math
import sys

import numpy as np
import pytest
import torch

from megatrain.engine import adamw, adamw_cpu
from megatrain.engine.adamw import Update, update_block
from megatrain.engine.adamw_cpu import States
from megatrain.engine.adamw_gpu import update_piece
from megatrain.engine.codecs import merge_master, split_master
from megatrain.models.blocks import BlockLayout, lay_out

SIZES = [1, 15, 17, 64, 130, 1000]


def layout_of(sizes: list[int], dtype: torch.dtype, fp32: tuple[int, ...] = ()) -> BlockLayout:
    """Parameters p0, p1, ... of the given lengths; every second one decays, those in `fp32` stay in fp32."""
    params = {f"p{i}": torch.empty(size, device="meta") for i, size in enumerate(sizes)}
    kept, decay = frozenset(f"p{i}" for i in fp32), frozenset(f"p{i}" for i in range(0, len(sizes), 2))
    return lay_out("block", "kind", params, {}, dtype, kept, decay, frozenset())


@pytest.fixture(params=["kernel", "operations"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every test with the fused kernel, and without numba."""
    if request.param == "operations":
        monkeypatch.setattr(adamw_cpu, "_kernel", lambda: None)
    else:
        assert adamw_cpu._kernel() is not None
    return request.param == "kernel"


def assert_same(value: torch.Tensor, expected: torch.Tensor, kernel: bool) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-6 * kernel, atol=2e-7 * kernel)


class Block:
    """The states of one block, and what the update should make of them."""

    def __init__(self, layout: BlockLayout, seed: int = 0, gradient_dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layout = layout
        self.generator = generator
        self.weights = torch.zeros(layout.weight_bytes, dtype=torch.uint8)
        self.masters = torch.zeros(layout.numel_a, dtype=torch.int16) if layout.compute_dtype is torch.bfloat16 else None
        self.grads = torch.zeros(layout.numel, dtype=gradient_dtype)
        self.exp_avg, self.exp_avg_sq = torch.zeros(layout.numel), torch.zeros(layout.numel)
        self.start = {entry.name: torch.randn(entry.numel, generator=generator) for entry in layout.entries}
        for entry in layout.entries:
            place = slice(entry.offset, entry.offset + entry.numel)
            if entry.segment == "b":
                layout.segment_b(self.weights)[place] = self.start[entry.name]
            elif self.masters is None:
                layout.segment_a(self.weights)[place] = self.start[entry.name]
            else:
                split_master(self.start[entry.name], layout.segment_a(self.weights)[place], self.masters[place])

    def draw_gradients(self) -> dict[str, torch.Tensor]:
        views = self.layout.flat_views(self.grads)
        for view in views.values():
            view.copy_(torch.randn(view.shape, generator=self.generator))
        return {name: view.float().clone() for name, view in views.items()}

    def update(self, update: Update) -> None:
        update_block(self.layout, self.weights, self.masters, self.grads, self.exp_avg, self.exp_avg_sq, update)

    def master(self) -> dict[str, torch.Tensor]:
        half = self.layout.segment_a(self.weights)
        exact = {"a": half if self.masters is None else merge_master(half, self.masters), "b": self.layout.segment_b(self.weights)}
        return {e.name: exact[e.segment][e.offset : e.offset + e.numel] for e in self.layout.entries}


def update_at(count: int, clip: float = 1.0, weight_decay: float = 0.1) -> Update:
    return Update(count, 1e-2 / count, clip, 0.9, 0.95, 1e-8, weight_decay)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("clip", [1.0, 0.3])
def test_same_as_torch(
    dtype: torch.dtype, gradient_dtype: torch.dtype, clip: float, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw, "_PIECE_PER_THREAD", 61)  # pieces that begin and end anywhere
    monkeypatch.setattr(adamw_cpu, "_task_elements", lambda count, threads: 61)
    block = Block(layout_of(SIZES, dtype, fp32=(1, 4)), gradient_dtype=gradient_dtype)
    params = {name: value.clone().requires_grad_() for name, value in block.start.items()}
    decay = {entry.name: entry.decay for entry in block.layout.entries}
    assert set(decay.values()) == {True, False}
    groups = [{"params": [params[n] for n in params if decay[n] is kept], "weight_decay": 0.1 * kept} for kept in (True, False)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for count in range(1, 6):
        gradients = block.draw_gradients()
        before = block.grads.clone()
        for group in optimizer.param_groups:
            group["lr"] = update_at(count).learning_rate
        for name, param in params.items():
            param.grad = gradients[name] * clip
        optimizer.step()
        block.update(update_at(count, clip))
        for name, value in block.master().items():
            assert_same(value, params[name].detach(), kernel)
        assert torch.equal(block.grads, before)
    state = optimizer.state
    for flat, key in ((block.exp_avg, "exp_avg"), (block.exp_avg_sq, "exp_avg_sq")):
        for name, view in block.layout.flat_views(flat).items():
            assert_same(view, state[params[name]][key], kernel)


@pytest.mark.parametrize("length", [0, 1, 15, 17, 127])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_elements_agree_with_the_formula_in_fp64(length: int, weight_decay: float) -> None:
    """Kingma and Ba, algorithm 1, with decay as Loshchilov and Hutter place it."""
    block = Block(layout_of([length], torch.float32), seed=length)
    x = block.start["p0"].double().numpy().copy()
    m, v = np.zeros(length), np.zeros(length)
    for count in range(1, 8):
        g = block.draw_gradients()["p0"].double().numpy() * 0.5
        update = update_at(count, 0.5, weight_decay)
        block.update(update)
        x *= 1 - update.learning_rate * weight_decay
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        x -= update.learning_rate * (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.95**count)) + 1e-8)
    np.testing.assert_allclose(block.master()["p0"].numpy(), x, rtol=1e-5, atol=1e-6)


def test_gaps_between_parameters_stay_zero() -> None:
    block = Block(layout_of(SIZES, torch.bfloat16, fp32=(1, 4)))
    for count in (1, 2, 3):
        block.draw_gradients()
        block.update(update_at(count))
    for flat in (block.exp_avg, block.exp_avg_sq):
        gaps = flat.clone()
        for view in block.layout.flat_views(gaps).values():
            view.zero_()
        assert not gaps.any()
    views = block.layout.weight_views(block.weights.clone())
    assert all(value.isfinite().all() for value in views.values())
    bytes_left = block.weights.clone()
    for view in block.layout.weight_views(bytes_left).values():
        view.zero_()
    assert not bytes_left.any()


def test_nothing_moves_at_rate_zero() -> None:
    block = Block(layout_of(SIZES, torch.bfloat16))
    before = block.weights.clone(), block.masters.clone()
    block.draw_gradients()
    block.update(Update(1, 0.0, 1.0, 0.9, 0.95, 1e-8, 0.1))
    assert torch.equal(block.weights, before[0])
    assert torch.equal(block.masters, before[1])
    assert block.exp_avg.any()


def test_small_steps_add_up_in_the_rest() -> None:
    """Steps far below bf16's resolution move the master, and in the end the half."""
    block = Block(layout_of([64], torch.bfloat16))
    block.grads.fill_(1.0)
    start = block.master()["p0"].clone()
    for count in range(1, 101):
        block.update(Update(count, 1e-5, 1.0, 0.9, 0.95, 1e-8, 0.0))
        assert math.isfinite(float(block.master()["p0"].sum()))
    torch.testing.assert_close(start - block.master()["p0"], torch.full((64,), 1e-3), rtol=2e-3, atol=2e-6)


def test_neither_pieces_nor_threads_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for piece, threads in ((1 << 18, 2), (7, 1), (20_000, 3)):
        monkeypatch.setattr(adamw_cpu, "_task_elements", lambda count, threads, piece=piece: piece)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        block = Block(layout_of([30_001, 17], torch.bfloat16, fp32=(1,)), gradient_dtype=torch.bfloat16)
        for count in (1, 2, 3):
            block.draw_gradients()
            block.update(update_at(count, clip=0.7))
        found.append((block.weights, block.masters, block.exp_avg, block.exp_avg_sq))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_may_begin_at_any_element(gradient_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    flat = [torch.randn(1040, generator=generator).to(dtype) for dtype in (torch.float32, gradient_dtype, torch.float32, torch.float32)]
    flat[3].abs_()
    params, grads, first, second = (state[k : k + 1033] for k, state in enumerate(flat))
    expected = [state.clone() for state in (params, first, second)]
    scalars = update_at(3).scalars(decay=True)
    adamw._update_range(States(expected[0], None, grads.clone(), expected[1], expected[2]), scalars)
    states = States(params, None, grads, first, second)
    if not adamw_cpu.update_range(states, scalars):
        adamw._update_range(states, scalars)
    for state, value in zip((params, first, second), expected, strict=True):
        torch.testing.assert_close(state, value, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("kernel", ["kernel"], indirect=True)  # without it torch's own threads decide
def test_moments_that_fade_become_zero_and_stay_fast(kernel: bool) -> None:
    block = Block(layout_of([64], torch.float32))
    block.exp_avg_sq.fill_(1.2e-38)  # the smallest normal number, nearly
    block.update(update_at(1))
    assert not block.exp_avg_sq.any()


def test_a_damaged_cache_of_numba_costs_no_run(tmp_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    assert adamw_cpu._load_kernel() is not None
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in files:
        path.write_bytes(b"")
    assert files
    assert adamw_cpu._load_kernel() is not None
    assert "cannot use its cache" in caplog.text


def test_without_numba_it_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(adamw_cpu, "_kernel", adamw_cpu._load_kernel)
    monkeypatch.setitem(sys.modules, "numba", None)
    block = Block(layout_of([64], torch.float32))
    block.draw_gradients()
    before = block.weights.clone()
    with caplog.at_level(logging.WARNING):
        block.update(update_at(1))
    assert "numba does not load" in caplog.text
    assert not torch.equal(block.weights, before)


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("split", [False, True])
def test_what_is_compiled_for_a_gpu_computes_the_same(gradient_dtype: torch.dtype, split: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    master, first = (torch.randn(1033, generator=generator) for _ in range(2))
    grads, second = torch.randn(1033, generator=generator).to(gradient_dtype), first.square()
    halves, rests = torch.empty(1033, dtype=torch.bfloat16), torch.empty(1033, dtype=torch.int16)
    split_master(master, halves, rests)
    states = States(halves if split else master, rests if split else None, grads, first, second)
    expected = States(*(None if state is None else state.clone() for state in states))
    scalars = update_at(3, clip=0.7).scalars(decay=True)
    adamw._update_range(expected, scalars)
    update_piece(*states, torch.tensor(scalars))
    for state, value in zip((states.exp_avg, states.exp_avg_sq), (expected.exp_avg, expected.exp_avg_sq), strict=True):
        torch.testing.assert_close(state, value, rtol=1e-6, atol=2e-7)
    found, wanted = ((merge_master(s.params, s.rests) if split else s.params) for s in (states, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=2e-7)
