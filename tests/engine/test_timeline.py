"""What a timeline records of a device, on the CPU and on lanes that run late and in any order."""

import pytest
import torch

from megatrain.engine.device import D2H, H2D, HOST, Device
from megatrain.engine.schedule import Do
from megatrain.engine.spans import LAUNCHER, Span
from megatrain.engine.timeline import Timeline
from tests.engine.fake_device import FakeDevice


def work_of_every_kind(device: Device) -> list[Span]:
    """A copy up, a layer that reads it, a copy down, an update, and a layer that depends on nothing."""
    home, slot, hidden, parked = (device.empty(4, torch.float32, name) for name in ("weights of a", "slot", "hidden", "grads of a"))
    device.timeline = Timeline(device.torch_device)
    device.copy(H2D, slot, home, target_part=slice(0, 2), source_part=slice(0, 2))
    device.timeline.begin(Do.LAYER, 3, 1)
    device.launch("compute", hidden.tensor.zero_, reads=[slot], writes=[hidden])
    device.copy(D2H, parked, hidden)
    device.launch(HOST, lambda: None, writes=[home, parked], label="a")
    device.timeline.begin(Do.HEAD, 4, 0)
    device.launch("compute", lambda: None)
    device.synchronize()
    return device.timeline.spans()


@pytest.mark.parametrize("device", [Device(), *map(FakeDevice, range(4))], ids=lambda device: type(device).__name__)
def test_every_launch_has_a_span_with_what_it_was_for(device: Device) -> None:
    found = {span.number: span for span in work_of_every_kind(device) if span.lane != LAUNCHER}
    assert [(found[number].lane, found[number].part, found[number].name, found[number].num_bytes) for number in range(5)] == [
        ("h2d", "h2d", "weights of a → slot", 8),
        ("compute", "forward", "layer, block 3, micro-batch 1", 0),
        ("d2h", "d2h", "hidden → grads of a", 16),
        ("host", "optimizer", "a", 0),
        ("compute", "head", "head, block 4, micro-batch 0", 0),
    ]
    assert [found[number].after for number in range(5)] == [(), (0,), (1,), (0, 2), (1,)]
    for span in found.values():
        assert 0 <= span.start_s <= span.end_s
        assert all(found[number].end_s <= span.start_s for number in span.after)


def test_the_thread_that_launches_waits_where_a_lane_has_no_thread() -> None:
    waits = [span.part for span in work_of_every_kind(Device()) if span.lane == LAUNCHER]
    assert waits == ["h2d", "d2h", "optimizer"]


def test_work_that_fails_has_no_end() -> None:
    device = Device()
    device.timeline = Timeline(device.torch_device)
    with pytest.raises(ZeroDivisionError):
        device.launch("compute", lambda: 1 / 0)
    device.launch("compute", lambda: None)
    assert [span.number for span in device.timeline.spans()] == [1]


def test_nothing_is_watched_when_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timeline, "watch", lambda *_, **__: pytest.fail("watched"))
    Device().launch("compute", lambda: None)


def test_copies_can_be_left_out() -> None:
    device = Device()
    target, source = (device.empty(2, torch.float32, name) for name in ("target", "source"))
    target.tensor.zero_()
    source.tensor.fill_(1.0)
    device.transfers = False
    device.copy("h2d", target, source)
    assert target.tensor.tolist() == [0.0, 0.0]
    assert not device.bytes_moved
    device.transfers = True
    device.copy("h2d", target, source)
    assert target.tensor.tolist() == [1.0, 1.0]
    assert device.bytes_moved == {"h2d": 8}
