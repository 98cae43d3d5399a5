"""The disk tier: exact bytes, aligned requests, room taken at once, nothing left behind, failures in words."""

import errno
import os
from pathlib import Path

import pytest
import torch

from megatrain import platform
from megatrain.engine import nvme
from megatrain.engine.adamw import Update
from megatrain.engine.debug import Debug
from megatrain.engine.device import DISK_READ, DISK_WRITE, Device
from megatrain.engine.engine import Engine
from megatrain.engine.nvme import OffloadFile, aligned_bytes, disk_bytes
from megatrain.errors import DiskFullError, PlanError, TrainingError
from megatrain.precision import PRECISIONS
from tests.parity import ALL_NVME, Cut, Recipe, assert_same_bits, batches, make_engine, run, skeleton, states, update_of

ALIGNMENT = platform.DIRECT_ALIGNMENT


def noise(num_bytes: int, seed: int = 0) -> torch.Tensor:
    whole = aligned_bytes(num_bytes)
    whole.copy_(torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return whole


def test_what_was_written_is_read_in_requests_of_any_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "REQUEST_BYTES", 2 * ALIGNMENT)
    file = OffloadFile(tmp_path / "new folder", 16 * ALIGNMENT)
    parts = {offset: noise(count * ALIGNMENT, seed=offset) for offset, count in ((0, 1), (ALIGNMENT, 2), (3 * ALIGNMENT, 13))}
    for offset, part in parts.items():
        file.write(offset, part)
    for offset, part in parts.items():
        back = aligned_bytes(part.numel())
        file.read(offset, back)
        assert torch.equal(back, part)
    assert list((tmp_path / "new folder").iterdir()) == []
    file.close()


def test_sizes_are_whole_requests() -> None:
    assert [disk_bytes(size) for size in (0, 1, ALIGNMENT, ALIGNMENT + 1)] == [0, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]
    assert aligned_bytes(100).data_ptr() % ALIGNMENT == 0


def test_a_full_disk_is_noticed_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(platform, "_system_allocate", full)
    with pytest.raises(DiskFullError, match="No space is left"):
        OffloadFile(tmp_path, ALIGNMENT)


@pytest.mark.parametrize("operation", ["read_at", "write_at"])
def test_a_failing_disk_stops_the_run_in_words(operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("llama_tied", Cut(ALL_NVME))

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(platform, operation, broken)
    with pytest.raises(TrainingError, match="Input/output error"):
        run(engine, Recipe((1e-3,) * 2))


@pytest.mark.parametrize("operation", ["read_at", "write_at"])
def test_nothing_half_updated_is_ever_taken_for_finished(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One failed request in the middle of the updates, and the disk is well again: the state must still not be saved."""
    engine = make_engine("llama_tied", Cut(ALL_NVME))
    loss, norm = engine.train_step(batches(1)[0], 0)
    engine.decide(update_of(Recipe((1e-3,)), 0, norm))
    real, calls = getattr(platform, operation), []

    def fails_once(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 7:
            raise OSError(errno.EIO, "Input/output error")
        real(*arguments)

    monkeypatch.setattr(platform, operation, fails_once)
    with pytest.raises(TrainingError, match="Input/output error"):
        engine.finish()
    with pytest.raises(TrainingError, match="not whole"):
        engine.finish()


def test_a_short_file_is_an_error_not_a_zero(tmp_path: Path) -> None:
    file = OffloadFile(tmp_path, 2 * ALIGNMENT)
    os.ftruncate(file._descriptor, ALIGNMENT)
    with pytest.raises(TrainingError, match="became shorter"):
        file.read(0, aligned_bytes(2 * ALIGNMENT))
    file.close()


def test_a_plan_that_needs_a_folder_says_so() -> None:
    own = skeleton("llama_tied")
    plan = Cut(ALL_NVME).plan(len(own.layouts))
    with pytest.raises(PlanError, match="no offload folder"):
        Engine(own, plan, PRECISIONS["fp32"], torch.float32, Device(Debug()), packs_per_step=5, sequence_length=24)


def test_states_set_from_outside_replace_what_slots_hold() -> None:
    """As a resume does."""
    recipe = Recipe((1e-2,) * 2)
    source, target = (make_engine("llama_tied", Cut(ALL_NVME), "bf16", torch.bfloat16) for _ in range(2))
    run(source, recipe)
    run(target, Recipe((5e-2,) * 2))
    for index in range(len(target.layouts)):
        target.write_block(index, source.read_block(index))
    assert_same_bits(states(target), states(source))
    assert target.evaluate(batches(1)) == source.evaluate(batches(1))
    assert run(target, recipe).losses == run(source, recipe).losses


def test_bytes_on_disk_are_counted_and_few() -> None:
    """Each state is read and written once for the update, gradients once each, weights once more for backward."""
    engine = make_engine("llama_untied", Cut(ALL_NVME, disk_slots=3), "bf16", torch.bfloat16, Device(Debug()))
    first, second, third = batches(3)
    for step, batch in enumerate((first, second)):
        engine.train_step(batch, step)
        engine.decide(Update(step + 1, 1e-3, 1.0, 0.9, 0.95, 1e-8, 0.0))
    engine.device.take_counters()
    engine.train_step(third, 2)
    moved = engine.device.take_counters()[0]
    padded = [{name: disk_bytes(state.nbytes) for name, state in engine.read_block(i).items()} for i in range(len(engine.layouts))]
    grads = sum(disk_bytes(2 * layout.numel) for layout in engine.layouts)
    kept, weights = sum(sum(sizes.values()) for sizes in padded), sum(sizes["weights"] for sizes in padded)
    assert moved[DISK_WRITE] == kept + grads
    assert kept + grads <= moved[DISK_READ] + weights  # some weights are still in their slots
    assert moved[DISK_READ] <= kept + grads + weights


def test_the_tier_tells_its_size() -> None:
    engine = make_engine("llama_tied", Cut(ALL_NVME))
    assert engine.store.disk is not None
    whole = sum(disk_bytes(state.nbytes) for i in range(len(engine.layouts)) for state in engine.read_block(i).values())
    assert engine.store.disk.num_bytes == whole + sum(disk_bytes(4 * layout.numel) for layout in engine.layouts)
