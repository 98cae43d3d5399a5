"""Whatever legal order the lanes run in, a run gives the same bits; and an order that is not declared shows."""

from collections.abc import Iterable, Sequence
from functools import cache

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatrain.engine.adamw import Update
from megatrain.engine.debug import Debug
from megatrain.engine.device import COMPUTE, D2H, H2D, HOST, Buffer, Device, Event, Work
from megatrain.plan import Placement
from tests.engine.fake_device import FakeDevice
from tests.parity import ALL_NVME, ALL_RAM, NVME, RAM, VRAM, Cut, Recipe, assert_same_bits, batches, make_engine, states, update_of

PACKS, LENGTH = 3, 8
SIDES = (
    Placement(RAM, RAM, RAM, VRAM), Placement(RAM, RAM, VRAM, RAM), Placement(RAM, RAM, RAM, VRAM), Placement(VRAM, RAM, RAM, RAM),
    Placement(RAM, VRAM, VRAM, RAM), Placement(RAM, RAM, RAM, RAM),
)  # fmt: skip
TIERS = (
    Placement(RAM, NVME, RAM, NVME), Placement(NVME, NVME, NVME, VRAM), Placement(NVME, RAM, RAM, RAM), Placement(VRAM, RAM, NVME, NVME),
    Placement(NVME, NVME, NVME, NVME), Placement(RAM, RAM, RAM, RAM),
)  # fmt: skip
PLANS = {
    "streamed, 2 slots": ("llama_tied", Cut(ALL_RAM, 1)),
    "streamed, 3 slots": ("llama_untied", Cut(ALL_RAM, 1, weight_slots=3, grad_slots=2)),
    "inputs in RAM": ("llama_tied", Cut(ALL_RAM, 1, inputs_tier=RAM)),
    "groups, sums in VRAM": ("llama_untied", Cut(ALL_RAM, 1, 2, inputs_tier=RAM)),
    "groups, sums in RAM": ("llama_tied", Cut(ALL_RAM, 1, 1, inputs_tier=RAM, accumulators_tier=RAM)),
    "groups, sums in RAM, untied": ("llama_untied", Cut(ALL_RAM, 1, 1, grad_slots=2, accumulators_tier=RAM)),
    "updates on both sides": ("llama_tied", Cut(SIDES, 1, inputs_tier=RAM)),
    "updates on both sides, untied": ("llama_untied", Cut(SIDES[::-1], 1, 1, weight_slots=3, accumulators_tier=RAM)),
    "everything on disk, 2 slots": ("llama_tied", Cut(ALL_NVME, 1, inputs_tier=RAM)),
    "everything on disk, 3 slots, groups": ("llama_untied", Cut(ALL_NVME, 1, 1, disk_slots=3, weight_slots=3, accumulators_tier=RAM)),
    "three tiers": ("llama_untied", Cut(TIERS, 1, inputs_tier=RAM)),
    "states of two tiers everywhere": ("qwen3_moe", Cut(Placement(VRAM, RAM, VRAM, VRAM), 1, inputs_tier=RAM)),
}


def everything(name: str, device: Device) -> tuple[list[object], dict[str, torch.Tensor]]:
    """What three steps, two evaluations and the finished states come to."""
    family, cut = PLANS[name]
    engine = make_engine(family, cut, "bf16", torch.bfloat16, device, packs=PACKS, length=LENGTH)
    recipe, numbers = Recipe((1e-2,) * 3), []
    for step, batch in enumerate(batches(3, PACKS, LENGTH)):
        numbers.append(engine.train_step(batch, step))
        engine.decide(update_of(recipe, step, numbers[-1][1]))
        if step == 1:
            numbers.append(engine.evaluate(batches(2, 2, LENGTH, first_seed=40)))
    numbers.append(engine.evaluate(batches(1, 1, LENGTH, first_seed=41)))
    found = states(engine) | {f"gradient {key}": value for key, value in engine.parked_gradients().items()}
    engine.close()
    return numbers, found


@cache
def immediate(name: str) -> tuple[list[object], dict[str, torch.Tensor]]:
    return everything(name, Device(Debug()))


@pytest.mark.parametrize("name", PLANS)
@settings(max_examples=4)
@example(seed=0)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_order_gives_the_same_bits(name: str, seed: int) -> None:
    numbers, found = everything(name, FakeDevice(seed))
    assert numbers == immediate(name)[0]
    assert_same_bits(found, immediate(name)[1])


def test_lanes_really_overtake_each_other() -> None:
    """Else the test above would prove nothing."""
    orders = set()
    for seed in range(6):
        device = FakeDevice(seed)
        everything("inputs in RAM", device)
        assert set(device.order) == {COMPUTE, H2D, D2H, HOST}
        orders.add(tuple(device.order))
    assert len(orders) == 6


# -- faults that the fake finds


class Forgets(FakeDevice):
    """A device to which the hand-overs of some buffers are not told."""

    def __init__(self, seed: int, part: str, prefix: str) -> None:
        super().__init__(seed)
        self._part, self._prefix = part, prefix
        self.forgotten = 0

    def launch(self, lane: str, work: Work, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = (), **rest: object) -> Event:
        told = {"reads": list(reads), "writes": list(writes)}
        kept = [buffer for buffer in told[self._part] if not buffer.name.startswith(self._prefix)]
        self.forgotten += len(told[self._part]) - len(kept)
        return super().launch(lane, work, **{**told, self._part: kept}, **rest)


FAULTS = [
    ("streamed, 2 slots", "reads", "weight slot"),  # a layer computes before its weights are there, or loses them to the next
    ("streamed, 2 slots", "writes", "weight slot"),
    ("streamed, 3 slots", "writes", "edge slot"),
    ("streamed, 2 slots", "reads", "weights of"),  # weights are loaded before they are updated
    ("streamed, 2 slots", "writes", "weights of"),
    ("inputs in RAM", "reads", "hidden buffer"),
    ("inputs in RAM", "writes", "hidden buffer"),
    ("streamed, 2 slots", "reads", "park slot"),
    ("streamed, 2 slots", "writes", "park slot"),
    ("streamed, 2 slots", "writes", "gradient slot"),
    ("groups, sums in RAM, untied", "reads", "gradient slot"),
    ("groups, sums in RAM, untied", "writes", "gradient slot"),
    ("groups, sums in RAM", "reads", "edge gradient slot"),
    ("updates on both sides", "writes", "staging of"),
    ("updates on both sides", "writes", "weights of"),
    ("everything on disk, 2 slots", "writes", "disk slot"),  # states are updated before they are read, or lost to the next block
    ("everything on disk, 2 slots", "reads", "disk slot"),
]


@pytest.mark.parametrize(("name", "part", "prefix"), FAULTS, ids=[" ".join(fault) for fault in FAULTS])
def test_a_forgotten_hand_over_is_found(name: str, part: str, prefix: str) -> None:
    for seed in range(30):
        device = Forgets(seed, part, prefix)
        try:
            numbers, found = everything(name, device)
            assert device.forgotten
            assert numbers == immediate(name)[0]
            assert_same_bits(found, immediate(name)[1])
        except AssertionError:
            return
    pytest.fail("no order of 30 showed it")


# -- poison


class RecordsReleases(Device):
    def __init__(self) -> None:
        super().__init__(Debug(poison=True))
        self.released: set[str] = set()
        self.made: list[Buffer] = []

    def release(self, lane: str, buffer: Buffer) -> None:
        super().release(lane, buffer)
        assert bool((buffer.tensor.view(torch.uint8) == 255).all())
        self.released.add(buffer.name)

    def empty(self, num_elements: int, dtype: torch.dtype, name: str) -> Buffer:
        self.made.append(super().empty(num_elements, dtype, name))
        return self.made[-1]


@pytest.mark.parametrize("name", PLANS)
def test_everything_that_is_handed_over_is_poisoned_when_released(name: str) -> None:
    device = RecordsReleases()
    everything(name, device)
    kinds = (
        "weight slot",
        "edge slot",
        "gradient slot",
        "edge gradient slot",
        "park slot",
        "hidden buffer",
        "stored input",
        "accumulator",
        "staging",
    )
    made = {buffer.name for buffer in device.made if buffer.name.startswith(kinds)}
    spare = {f"hidden buffer {i}" for i in range(99)}  # a pool takes the first free one: the last are spare
    assert made - device.released <= spare
    assert any(item.startswith(("hidden buffer", "stored input")) for item in device.released)


def test_poison_is_nan_in_every_type() -> None:
    device = Device(Debug(poison=True))
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        buffer = device.empty(5, dtype, "slot")
        device.release(COMPUTE, buffer)
        assert buffer.tensor.isnan().all()


# -- the devices themselves


def test_copies_are_counted_by_lane_and_taken_once() -> None:
    device = Device(Debug())
    a, b = device.empty(8, torch.float32, "a"), device.empty(8, torch.float32, "b")
    a.tensor.copy_(torch.arange(8.0))
    device.copy(H2D, b, a)
    device.copy(D2H, b, a, target_part=slice(0, 2), source_part=slice(6, 8))
    assert b.tensor.tolist() == [6, 7, 2, 3, 4, 5, 6, 7]
    assert device.take_counters()[0] == {H2D: 32, D2H: 8}
    assert device.take_counters()[0] == {}


def test_a_launch_waits_for_writers_of_what_it_reads_and_for_all_users_of_what_it_writes() -> None:
    seen: list[tuple[str, Sequence[Event]]] = []

    class Listens(Device):
        def _submit(self, lane: str, work: Work, before: list[Event]) -> Event:
            seen.append((lane, before))
            return super()._submit(lane, work, before)

    device = Listens(Debug())
    buffer, other = device.empty(1, torch.float32, "a"), device.empty(1, torch.float32, "b")
    written = device.launch(H2D, lambda: None, writes=[buffer])
    first = device.launch(COMPUTE, lambda: None, reads=[buffer], writes=[other])
    second = device.launch(COMPUTE, lambda: None, reads=[buffer])
    third = device.launch(D2H, lambda: None, reads=[buffer])
    device.launch(HOST, lambda: None, writes=[buffer])
    device.launch(D2H, lambda: None, reads=[other])
    assert [before for _, before in seen] == [[], [written], [written], [written], [written, second, third], [first]]


def test_blocking_mode_waits_for_every_launch() -> None:
    waited = []

    class Listens(Device):
        def wait(self, event: Event | None, reason: str = "ring") -> None:
            waited.append(event)

    device = Listens(Debug(sync=True))
    launched = [device.launch(COMPUTE, lambda: None), device.launch(D2H, lambda: None)]
    assert waited == launched


def test_a_failure_on_a_lane_reaches_the_host_and_stops_what_depends_on_it() -> None:
    device, ran = FakeDevice(1), []
    buffer, free = device.empty(1, torch.float32, "a"), device.empty(1, torch.float32, "b")

    def fail() -> None:
        raise ValueError("injected")

    device.launch(HOST, fail, writes=[buffer])
    after = device.launch(H2D, lambda: ran.append("after"), reads=[buffer])
    device.launch(COMPUTE, lambda: ran.append("free"), writes=[free])
    with pytest.raises(ValueError, match="injected"):
        device.wait(after)
    device.launch(D2H, lambda: ran.append("after"), reads=[buffer])
    with pytest.raises(ValueError, match="injected"):
        device.synchronize()
    assert ran == ["free"]


def test_a_failed_update_reaches_the_host() -> None:
    device = FakeDevice(3)
    engine = make_engine("llama_tied", Cut(ALL_RAM, 1), device=device, packs=PACKS, length=LENGTH)
    engine.train_step(batches(1, PACKS, LENGTH)[0], 0)
    engine.decide(Update(0, 1e-3, 1.0, 0.9, 0.95, 1e-8, 0.0))  # step 0: the bias correction divides by zero
    with pytest.raises(ZeroDivisionError):
        engine.finish()
