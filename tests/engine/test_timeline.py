"""Where a step's time went, from spans whose answer is known."""

import pytest
import torch

from megatrain.engine.device import Device
from megatrain.engine.schedule import Do
from megatrain.engine.timeline import Span, Timeline, split


def spans(*made: tuple[str, str, float, float]) -> list[Span]:
    return [Span(lane, part, "", start, end) for lane, part, start, end in made]


def test_what_compute_waits_for_is_what_ran_meanwhile() -> None:
    found = split(
        spans(
            ("compute", "forward", 0.0, 1.0),
            ("h2d", "h2d", 0.5, 2.0),  # a second of waiting for a copy down
            ("compute", "forward", 2.0, 3.0),
            ("host", "optimizer", 1.0, 3.5),  # and half of one for an update
            ("compute", "backward", 4.0, 9.0),
            ("d2h", "d2h", 9.0, 9.5),
        ),
        10.0,
    )
    assert found["forward"] == 2.0
    assert found["backward"] == 5.0
    waits = [found[f"waiting for {what}"] for what in ("h2d", "optimizer", "disk", "d2h")]
    assert waits == pytest.approx([1.0, 0.5, 0.0, 0.5])
    assert found["launching"] == pytest.approx(1.0)
    assert sum(found.values()) == pytest.approx(10.0)


def test_a_device_tells_what_it_does() -> None:
    device = Device()
    device.timeline = Timeline(device.torch_device)
    device.timeline.begin(Do.LAYER, 3, 1)
    device.launch("compute", lambda: None)
    device.launch("h2d", lambda: None)
    found = device.timeline.spans()
    assert [(span.lane, span.part) for span in found] == [("compute", "forward"), ("h2d", "h2d")]
    assert found[0].name == "layer, block 3, micro-batch 1"


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
