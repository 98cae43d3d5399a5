"""Spans: what ran on each lane and when, and the seconds of a step that follow from them. Plain values, no torch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

LAUNCHER = "launcher"  # not a lane: the thread that launches, while it waits for one
WAITING = {"h2d": "h2d", "d2h": "d2h", "host": "optimizer", "disk_read": "disk", "disk_write": "disk"}  # for what, by lane

Stretch = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """One piece of work, in seconds since some moment.

    part: forward, head, backward, optimizer or other on the compute lane, optimizer on the host's; elsewhere the lane, and
    for LAUNCHER what it waits for. number: order of the launches, -1 for LAUNCHER. after: numbers of what had to be over first.
    """

    lane: str
    part: str
    name: str
    start_s: float
    end_s: float
    num_bytes: int = 0  # that it moves
    number: int = -1
    after: tuple[int, ...] = ()


def cut(spans: Iterable[Span], start_s: float, end_s: float) -> list[Span]:
    """What lies between two moments, in seconds since the first, in order of start; spans that reach out are cut off."""
    inside = [span for span in spans if span.end_s > start_s and span.start_s < end_s]
    moved = [replace(span, start_s=max(span.start_s, start_s) - start_s, end_s=min(span.end_s, end_s) - start_s) for span in inside]
    return sorted(moved, key=lambda span: (span.start_s, span.number))


def split(spans: Iterable[Span], step_s: float) -> dict[str, float]:
    """Seconds of a step by what the compute lane did, and by what it waited for; they add up to `step_s`.

    A gap before a piece of computation is followed back: to whatever it depended on that ended last, to what that depended
    on, and so on until the gap's beginning; each takes the time from its own start. What is left is put down to the lane that the
    launching thread waited for, and to `launching` (Python, the data, calls into the driver) where it waited for none.
    """
    spans = list(spans)
    numbered = {span.number: span for span in spans if span.number >= 0}
    found = dict.fromkeys(("forward", "head", "backward", "optimizer", "other"), 0.0)
    waiting = dict.fromkeys(("h2d", "d2h", "optimizer", "disk"), 0.0)
    idle: list[Stretch] = []
    last = 0.0
    for span in sorted((span for span in spans if span.lane == "compute"), key=lambda span: span.start_s):
        if span.start_s > last:
            idle += _follow_back(span, last, numbered, waiting)
        found[span.part] += max(0.0, span.end_s - max(span.start_s, last))
        last = max(last, span.end_s)
    idle.append((last, max(last, step_s)))
    for what in waiting:
        waits = [(span.start_s, span.end_s) for span in spans if span.lane == LAUNCHER and span.part == what]
        rest = _without(idle, waits)
        waiting[what] += _length(idle) - _length(rest)
        idle = rest
    return found | {f"waiting for {what}": seconds for what, seconds in waiting.items()} | {"launching": _length(idle)}


def _follow_back(span: Span, start_s: float, numbered: dict[int, Span], waiting: dict[str, float]) -> list[Stretch]:
    """Add what `span` waited for since `start_s` to `waiting`; the stretches in which nothing that it depended on was running."""
    idle: list[Stretch] = []
    at = span.start_s
    while at > start_s:
        before = [numbered[number] for number in span.after if number in numbered and numbered[number].end_s > start_s]
        if not before:
            return [*idle, (start_s, at)]
        span = max(before, key=lambda other: other.end_s)
        if span.end_s < at:
            idle.append((span.end_s, at))
            at = span.end_s
        begin = max(span.start_s, start_s)
        if begin < at:
            if span.lane in WAITING:
                waiting[WAITING[span.lane]] += at - begin
            at = begin
    return idle


def _without(stretches: Iterable[Stretch], taken: Iterable[Stretch]) -> list[Stretch]:
    """What is left of stretches outside others, which may overlap."""
    left = [(start, end) for start, end in stretches if start < end]
    for begin, over in taken:
        pieces = [piece for start, end in left for piece in ((start, min(end, begin)), (max(start, over), end))]
        left = [(start, end) for start, end in pieces if start < end]
    return left


def _length(stretches: Iterable[Stretch]) -> float:
    return sum(end - start for start, end in stretches)
