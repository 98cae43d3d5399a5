"""Whole steps with a timeline, and without transfers: on the CPU, on lanes in any order, and on a GPU where there is one."""

import math

import pytest
import torch

from megatrain.engine.debug import Debug
from megatrain.engine.device import CudaDevice, Device
from megatrain.engine.engine import Engine
from megatrain.engine.spans import LAUNCHER, Span, cut, split
from megatrain.engine.timeline import Timeline
from megatrain.plan import Placement, Tier
from tests.engine.fake_device import LANES, FakeDevice
from tests.parity import Cut, Recipe, batches, make_engine, update_of

RAM, NVME = Tier.RAM, Tier.NVME
STREAMED = Cut(Placement(RAM, RAM, RAM, NVME), 1, inputs_tier=RAM)  # every lane has work
RECIPE = Recipe((1e-2,) * 3)


def engine_on(device: Device) -> Engine:
    return make_engine("llama_tied", STREAMED, "bf16", torch.bfloat16, device, packs=2, length=16)


def steps(engine: Engine, timeline: Timeline | None = None) -> tuple[list[tuple[float, float]], list[float]]:
    """What three steps return, and when each ended."""
    numbers, moments = [], []
    for step, batch in enumerate(batches(3, 2, 16)):
        if step == 1:  # the first compiles and sets up
            engine.device.timeline = timeline
        numbers.append(engine.train_step(batch, step))
        engine.decide(update_of(RECIPE, step, numbers[-1][1]))
        moments.append(timeline.now() if timeline else 0.0)
    engine.device.timeline = None
    engine.finish()
    return numbers, moments


def check(spans: list[Span]) -> None:
    """Every lane has work, and none began before what it depended on was over."""
    assert {span.lane for span in spans if span.lane != LAUNCHER} == set(LANES)
    numbered = {span.number: span for span in spans if span.number >= 0}
    for span in numbered.values():
        assert all(numbered[number].end_s <= span.start_s + 5e-4 for number in span.after), "clocks agree"
    names = {(span.lane, span.name) for span in spans}
    assert ("h2d", "weights of layer000 → weight slot 0") in names or ("h2d", "weights of layer000 → weight slot 1") in names
    assert ("host", "layer000") in names


@pytest.mark.parametrize("device", [Device(Debug()), FakeDevice(0), FakeDevice(1)], ids=lambda device: type(device).__name__)
def test_a_timeline_sees_every_lane_and_changes_no_bit(device: Device) -> None:
    engine, timeline = engine_on(device), Timeline(device.torch_device)
    numbers, moments = steps(engine, timeline)
    engine.close()
    plain = engine_on(Device(Debug()))
    assert numbers == steps(plain)[0]
    plain.close()
    spans = timeline.spans()
    check(spans)
    step_s = moments[2] - moments[1]
    parts = split(cut(spans, *moments[1:]), step_s)
    assert sum(parts.values()) == pytest.approx(step_s)
    assert min(parts.values()) >= 0
    assert min(parts[name] for name in ("forward", "head", "backward")) > 0


def test_a_step_without_transfers_moves_nothing_and_stays_finite() -> None:
    engine = engine_on(Device(Debug()))
    steps(engine)
    engine.device.take_counters()
    engine.device.transfers = False
    for step, batch in enumerate(batches(2, 2, 16)):
        assert all(map(math.isfinite, engine.train_step(batch, step)))
    assert engine.device.take_counters()[0] == {}
    engine.close()


def test_work_on_a_stream_lies_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [5.0]  # milliseconds

    class FakeEvent:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: "FakeEvent") -> float:
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    timeline = Timeline(torch.device("cuda", 0))

    def work() -> None:
        clock[0] += 3.0

    clock[0] += 2.0
    timeline.watch("h2d", work, [], "copy", 8, on_stream=True)()
    (span,) = timeline.spans()
    assert (span.start_s, span.end_s) == pytest.approx((0.002, 0.005))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_are_timed_beside_the_lanes_of_the_host() -> None:
    device = CudaDevice(torch.device("cuda", 0))
    engine = engine_on(device)
    timeline = Timeline(device.torch_device)
    _, moments = steps(engine, timeline)
    check(timeline.spans())
    step_s = moments[2] - moments[1]
    assert sum(split(cut(timeline.spans(), *moments[1:]), step_s).values()) == pytest.approx(step_s)
    device.transfers = False
    assert all(map(math.isfinite, engine.train_step(batches(1, 2, 16)[0], 3)))
    engine.close()
