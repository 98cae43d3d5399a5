"""FakeDevice: lanes are queues whose work runs late, in a random order that the declared hand-overs allow.

On the CPU a launch runs at once, on a GPU nearly in the order of the launches; a hand-over that somebody forgot to
declare shows on neither. Here the head of any lane whose predecessors are over may run next, so an order in which the
missing hand-over matters comes up soon. Memory is poisoned when it is made and when it is released: what is read too early or
too late is NaN.
"""

import random
from collections import deque
from dataclasses import dataclass

import torch

from megatrain.engine.debug import Debug
from megatrain.engine.device import COMPUTE, D2H, DISK_READ, DISK_WRITE, H2D, HOST, Buffer, Device, Event, Work, poison

LANES = (COMPUTE, H2D, D2H, HOST, DISK_READ, DISK_WRITE)


class FakeEvent(Event):
    """The end of one piece of queued work: not over until the scheduler has run it."""

    __slots__ = ("error", "over")

    def __init__(self, lane: str) -> None:
        super().__init__(lane)
        self.over = False
        self.error: BaseException | None = None


@dataclass
class _Queued:
    work: Work
    before: list[Event]
    event: FakeEvent


class FakeDevice(Device):
    """Runs the lanes in an order that `seed` decides.

    A seed also decides how eager the lanes are: whether work runs soon after its launch, or only when the host waits,
    and which lanes come first when several could go on. `order` lists the lanes in the order in which they ran.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(Debug(poison=True))
        self._random = random.Random(seed)
        self._eagerness = self._random.choice((0.0, 0.0, 0.3, 0.9))
        self._steady = self._random.random() < 0.5  # the same lanes come first all the time, or others every time
        self._favour = {lane: self._random.random() for lane in LANES}
        self._queues: dict[str, deque[_Queued]] = {lane: deque() for lane in LANES}
        self.order: list[str] = []

    def empty(self, num_elements: int, dtype: torch.dtype, name: str) -> Buffer:
        buffer = super().empty(num_elements, dtype, name)
        poison(buffer.tensor)
        return buffer

    def _submit(self, lane: str, work: Work, before: list[Event]) -> Event:
        event = FakeEvent(lane)
        self._queues[lane].append(_Queued(work, before, event))
        while self._random.random() < self._eagerness and self._ready():
            self._run_one()
        return event

    def wait(self, event: Event | None, reason: str = "ring") -> None:
        while isinstance(event, FakeEvent) and not event.over:
            self._run_one()
        if isinstance(event, FakeEvent) and event.error is not None:
            raise event.error

    def synchronize(self) -> None:
        failed: BaseException | None = None
        while any(self._queues.values()):
            event = self._run_one()
            failed = failed or event.error
        if failed is not None:
            raise failed

    def close(self) -> None:
        self.synchronize()

    def _ready(self) -> list[str]:
        """Lanes whose next piece of work may run."""
        return [lane for lane, queue in self._queues.items() if queue and all(event.over for event in queue[0].before)]  # type: ignore[attr-defined]

    def _run_one(self) -> FakeEvent:
        ready = self._ready()
        assert ready, "deadlock: no lane can go on"
        lane = max(ready, key=lambda name: self._favour[name]) if self._steady else self._random.choice(ready)
        if self._random.random() < 0.1:
            lane = self._random.choice(ready)
        queued = self._queues[lane].popleft()
        self.order.append(lane)
        queued.event.over = True
        failed = next((event.error for event in queued.before if event.error is not None), None)  # type: ignore[attr-defined]
        if failed is not None:  # what depends on failed work must not run
            queued.event.error = failed
            return queued.event
        try:
            queued.work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the event
            queued.event.error = error
        return queued.event
