"""Timeline: records what a device runs on each lane, and when. Exists only while somebody wants it.

Work on streams of a GPU is put between two timing events, which are read when everything is over; work on other lanes is
timed by the clock of the host. Both count from one moment, at which the GPU was idle.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import torch

from megatrain.engine.schedule import Do
from megatrain.engine.spans import LAUNCHER, WAITING, Span

_PARTS = {
    Do.EMBED: "forward", Do.LAYER: "forward", Do.HEAD: "head", Do.LAYER_BACKWARD: "backward", Do.EMBED_BACKWARD: "backward",
    Do.OPEN: "backward", Do.CLOSE: "backward", Do.UPDATE: "optimizer",
}  # fmt: skip


@dataclass
class _Launched:
    """One launch; start and end are there once it is over."""

    lane: str
    part: str
    name: str
    num_bytes: int
    after: tuple[int, ...]
    start: "float | torch.cuda.Event | None" = None
    end: "float | torch.cuda.Event | None" = None


class Timeline:
    """What the lanes of one device do from now on. Launches come from one thread; their work may run on others."""

    def __init__(self, torch_device: torch.device) -> None:
        self._launched: list[_Launched] = []
        self._waits: list[Span] = []
        self._numbers: dict[Hashable, int] = {}  # by the event that a launch returned
        self._last: dict[str, int] = {}  # number of the last launch of each lane
        self._thread = threading.get_ident()
        self._doing: tuple[Do, int, int] | None = None
        if torch_device.type == "cuda":
            torch.cuda.synchronize(torch_device)
            self._zero = torch.cuda.Event(enable_timing=True)
            self._zero.record()
            self._zero.synchronize()
        self._zero_s = time.perf_counter()

    def now(self) -> float:
        """Seconds since the beginning, by the clock of the host."""
        return time.perf_counter() - self._zero_s

    def begin(self, do: Do, block: int, m: int) -> None:
        """What is launched on the compute lane from now on belongs to this operation."""
        self._doing = do, block, m

    def watch(
        self, lane: str, work: Callable[[], None], before: Iterable[Hashable], name: str, num_bytes: int, on_stream: bool
    ) -> Callable[[], None]:
        """`work` that leaves its start and end here when it runs. `name` says what moves; computation is named by its operation."""
        part, name = self._what(lane, name)
        after = {self._numbers[event] for event in before if event in self._numbers}
        if lane in self._last:  # lanes are queues
            after.add(self._last[lane])
        one = _Launched(lane, part, name, num_bytes, tuple(sorted(after)))
        self._last[lane] = len(self._launched)
        self._launched.append(one)
        return (lambda: self._on_stream(one, work)) if on_stream else (lambda: self._on_host(one, work))

    def launched(self, event: Hashable) -> None:
        """The last launch that was watched ends with this event."""
        self._numbers[event] = len(self._launched) - 1

    def waited(self, reason: str, start_s: float) -> None:
        """The launching thread waited from a moment of time.perf_counter until now."""
        self._waits.append(Span(LAUNCHER, reason, f"waits for {reason}", start_s - self._zero_s, self.now()))

    def spans(self) -> list[Span]:
        """Everything recorded that is over, in order of start. The device must be synchronised."""
        found = list(self._waits)
        for number, one in enumerate(self._launched):
            if one.start is not None and one.end is not None:
                times = self._seconds(one.start), self._seconds(one.end)
                found.append(Span(one.lane, one.part, one.name, *times, one.num_bytes, number, one.after))
        return sorted(found, key=lambda span: (span.start_s, span.number))

    def _what(self, lane: str, name: str) -> tuple[str, str]:
        """(part, name) of work that is launched now."""
        if lane != "compute":
            return ("optimizer" if lane == "host" else lane), name
        if self._doing is None:
            return "other", name or "step"
        do, block, m = self._doing
        return _PARTS.get(do, "other"), f"{do.value}, block {block}, micro-batch {m}"

    def _on_host(self, one: _Launched, work: Callable[[], None]) -> None:
        start = time.perf_counter()
        work()
        one.start, one.end = start - self._zero_s, self.now()
        if one.lane in WAITING and threading.get_ident() == self._thread:  # a lane without a thread of its own
            self.waited(WAITING[one.lane], start)

    def _on_stream(self, one: _Launched, work: Callable[[], None]) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        one.start, one.end = start, end

    def _seconds(self, when: "float | torch.cuda.Event") -> float:
        return when if isinstance(when, float) else self._zero.elapsed_time(when) / 1e3
