"""Where a step's time went, from spans whose answer is known."""

import pytest

from megatrain.engine.spans import LAUNCHER, Span, cut, split


def spans(*made: tuple[str, str, float, float, tuple[int, ...]]) -> list[Span]:
    """(lane, part, start, end, after), numbered in this order."""
    return [Span(lane, part, "", start, end, 0, number, after) for number, (lane, part, start, end, after) in enumerate(made)]


def waits(found: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("waiting for "): seconds for name, seconds in found.items() if name.startswith("waiting") and seconds}


def test_a_gap_is_put_down_to_what_the_next_computation_needed() -> None:
    found = split(
        spans(
            ("compute", "forward", 0.0, 1.0, ()),
            ("host", "optimizer", 0.0, 3.0, ()),  # the update of block 2
            ("d2h", "d2h", 0.0, 4.5, ()),  # busy all the time, and nobody's concern
            ("h2d", "h2d", 3.0, 4.0, (1,)),  # its weights
            ("compute", "forward", 4.0, 5.0, (0, 3)),
        ),
        5.0,
    )
    assert found["forward"] == 2.0
    assert waits(found) == pytest.approx({"optimizer": 2.0, "h2d": 1.0})
    assert sum(found.values()) == pytest.approx(5.0)


def test_a_copy_that_waits_for_its_turn_passes_the_blame_on() -> None:
    found = split(
        spans(
            ("compute", "backward", 0.0, 1.0, ()),
            ("disk_read", "disk_read", 0.5, 2.0, ()),
            ("h2d", "h2d", 2.0, 3.0, (1,)),
            ("h2d", "h2d", 3.0, 3.5, (2,)),  # this one is needed
            ("compute", "backward", 4.0, 6.0, (0, 3)),
        ),
        6.0,
    )
    assert waits(found) == pytest.approx({"disk": 1.0, "h2d": 1.5})
    assert found["launching"] == pytest.approx(0.5), "the copy was over half a second before"


def test_the_rest_is_what_the_launching_thread_did() -> None:
    made = spans(("compute", "head", 1.0, 2.0, ()), ("compute", "backward", 4.0, 5.0, (0,)))
    made.append(Span(LAUNCHER, "disk", "waits for disk", 2.5, 3.5))
    made.append(Span(LAUNCHER, "gpu", "waits for gpu", 4.0, 5.0))
    found = split(made, 6.0)
    assert waits(found) == pytest.approx({"disk": 1.0})
    assert found["launching"] == pytest.approx(3.0), "a second before, one in the gap, one after"
    assert sum(found.values()) == pytest.approx(6.0)


def test_a_step_is_cut_out_of_two() -> None:
    made = spans(
        ("h2d", "h2d", 0.0, 1.0, ()),
        ("d2h", "d2h", 1.0, 3.0, ()),
        ("compute", "forward", 2.5, 3.5, (1,)),
        ("host", "optimizer", 3.5, 9.0, ()),
    )
    found = [(span.lane, span.start_s, span.end_s) for span in cut(made, 2.0, 5.0)]
    assert found == [("d2h", 0.0, 1.0), ("compute", 0.5, 1.5), ("host", 1.5, 3.0)]
    assert split(cut(made, 2.0, 5.0), 3.0)["waiting for d2h"] == pytest.approx(0.5), "work of the step before counts too"


def test_an_empty_step_is_launching_alone() -> None:
    assert {name: seconds for name, seconds in split([], 2.0).items() if seconds} == {"launching": 2.0}
