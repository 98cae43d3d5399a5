"""Timeline: what ran on each lane of a device, and when. Recorded only while somebody wants it."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from megatrain.engine.schedule import Do

_PARTS = {
    Do.EMBED: "forward", Do.LAYER: "forward", Do.HEAD: "head", Do.LAYER_BACKWARD: "backward", Do.EMBED_BACKWARD: "backward",
    Do.OPEN: "backward", Do.CLOSE: "backward", Do.UPDATE: "optimizer",
}  # fmt: skip
_BLAME = (("h2d", "h2d"), ("host", "optimizer"), ("disk_read", "disk"), ("disk_write", "disk"), ("d2h", "d2h"))  # (lane, what for)


@dataclass(frozen=True)
class Span:
    """One piece of work: seconds since the recording began. part: forward, head, backward, optimizer, or the lane of a copy."""

    lane: str
    part: str
    name: str
    start_s: float
    end_s: float


class Timeline:
    """Spans of all lanes. `doing` names the operation of the schedule whose work is being launched."""

    def __init__(self, torch_device: torch.device) -> None:
        self._on_gpu = torch_device.type == "cuda"
        self._spans: list[Span] = []
        self._timed: list[tuple[str, str, str, torch.cuda.Event, torch.cuda.Event]] = []
        self._lock = threading.Lock()  # the lanes of the host are threads
        self._doing: tuple[Do, int, int] | None = None
        if self._on_gpu:
            torch.cuda.synchronize(torch_device)
            self._zero = torch.cuda.Event(enable_timing=True)
            self._zero.record()
            self._zero.synchronize()
        self._zero_s = time.perf_counter()

    def begin(self, do: Do, block: int, m: int) -> None:
        """What is launched from now on belongs to this operation."""
        self._doing = do, block, m

    def label(self, lane: str) -> tuple[str, str]:
        """(part, name) of work that is launched now."""
        do, block, m = self._doing or (None, 0, 0)
        part = _PARTS.get(do, "other") if lane == "compute" else "optimizer" if lane == "host" else lane
        return part, f"{do.value if do else 'step'}, block {block}, micro-batch {m}"

    def timed(self, lane: str, label: tuple[str, str], work: Callable[[], None]) -> None:
        """Run `work` of a lane of the host, and remember when."""
        start = time.perf_counter()
        work()
        span = Span(lane, *label, start - self._zero_s, time.perf_counter() - self._zero_s)
        with self._lock:
            self._spans.append(span)

    def on_stream(self, lane: str, work: Callable[[], None]) -> None:
        """Launch `work` on the current stream between two events."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        self._timed.append((lane, *self.label(lane), start, end))

    def spans(self) -> list[Span]:
        """Everything recorded, in order of start. The device must be synchronised."""
        found = list(self._spans)
        for lane, part, name, start, end in self._timed:
            found.append(Span(lane, part, name, self._zero.elapsed_time(start) / 1e3, self._zero.elapsed_time(end) / 1e3))
        return sorted(found, key=lambda span: span.start_s)


def split(spans: Iterable[Span], step_s: float) -> dict[str, float]:
    """Seconds of a step by what the compute lane did, and by what it waited for; `launching` where no lane was busy.

    An instant without computation is put down to the first busy lane of: copies down, updates on the host, disk, copies up.
    """
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        lanes[span.lane].append(span)
    found: dict[str, float] = defaultdict(float)
    for span in lanes["compute"]:
        found[span.part] += span.end_s - span.start_s
    idle = _without([(0.0, step_s)], lanes["compute"])
    for lane, reason in _BLAME:
        rest = _without(idle, lanes[lane])
        found[f"waiting for {reason}"] += _length(idle) - _length(rest)
        idle = rest
    found["launching"] = _length(idle)
    return dict(found)


def _without(stretches: list[tuple[float, float]], spans: list[Span]) -> list[tuple[float, float]]:
    """What is left of ascending stretches outside the spans."""
    left: list[tuple[float, float]] = []
    for start, end in stretches:
        for span in spans:  # ascending
            if span.end_s > start and span.start_s < end:
                if span.start_s > start:
                    left.append((start, span.start_s))
                start = max(start, span.end_s)
        if start < end:
            left.append((start, end))
    return left


def _length(stretches: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in stretches)
