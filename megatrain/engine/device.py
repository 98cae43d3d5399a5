"""Devices: lanes of work and the memory handed over between them.

All work of a step is launched on one of six lanes: `compute`, `h2d`, `d2h` (streams of the GPU), `host` (a thread, where
the CPU updates blocks), `disk_read` and `disk_write` (threads too). A launch names the buffers that it reads and writes;
the device orders it after whatever wrote what it reads, and after whatever read or wrote what it writes. That is the only
way memory is handed over, so there is one event and one owner for every hand-over, on every device: CUDA, the CPU (where
everything is immediate) and the fake of the tests (which runs the lanes in random legal orders).
"""

import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch

from megatrain.engine.debug import Debug, read_debug
from megatrain.engine.timeline import Timeline
from megatrain.errors import OutOfVramError

COMPUTE, H2D, D2H = "compute", "h2d", "d2h"
HOST, DISK_READ, DISK_WRITE = "host", "disk_read", "disk_write"
_WAITS = {HOST: "optimizer", DISK_READ: "disk", DISK_WRITE: "disk"}  # reason of waiting by the lane that is waited for

Work = Callable[[], None]


class Event:
    """The end of one launched piece of work."""

    __slots__ = ("cuda", "future", "lane")

    def __init__(self, lane: str, cuda: "torch.cuda.Event | None" = None, future: "Future[None] | None" = None) -> None:
        self.lane = lane
        self.cuda = cuda
        self.future = future


@dataclass(eq=False)
class Buffer:
    """A piece of memory that lanes hand over. Its content is defined once `writer` is over."""

    tensor: torch.Tensor
    name: str
    writer: Event | None = None
    readers: dict[str, Event] = field(default_factory=dict)  # the last one of each lane


class Device:
    """The CPU: every launch runs at once, in the caller's thread. Base of the others.

    `bytes_moved` counts copies by lane; `waits_s` the host's own waiting by reason. Both are reset by `take_counters`.
    """

    _stream_lanes: frozenset[str] = frozenset()  # lanes whose work is timed by events of the GPU

    def __init__(self, debug: Debug | None = None) -> None:
        self.debug = read_debug("") if debug is None else debug
        self.torch_device = torch.device("cpu")
        self.timeline: Timeline | None = None  # set to record what runs when
        self.transfers = True  # False leaves out what is moved, to time computation alone
        self.bytes_moved: dict[str, int] = defaultdict(int)
        self.waits_s: dict[str, float] = defaultdict(float)

    # -- what the engine calls

    def launch(
        self, lane: str, work: Work, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = (), label: str = "", num_bytes: int = 0
    ) -> Event:
        """Run `work` on `lane`, after everything that `reads` and `writes` depend on. Returns at once where lanes are asynchronous.

        For the timeline: `label` names the work (else its buffers do), `num_bytes` are what it moves.
        """
        reads, writes = list(reads), list(writes)
        found = [buffer.writer for buffer in [*reads, *writes]]
        found += [event for buffer in writes for event in buffer.readers.values()]
        before = [item for item in dict.fromkeys(found) if item is not None]
        timeline = self.timeline
        if timeline is not None:
            name = label or " → ".join(buffer.name for buffer in [*reads[:1], *writes[:1]])
            work = timeline.watch(lane, work, before, name, num_bytes, lane in self._stream_lanes)
        event = self._submit(lane, work, before)
        if timeline is not None:
            timeline.launched(event)
        for buffer in writes:
            buffer.writer, buffer.readers = event, {}
        for buffer in reads:
            if buffer not in writes:
                buffer.readers[lane] = event
        if self.debug.sync:
            self.wait(event)
        return event

    def copy(self, lane: str, target: Buffer, source: Buffer, target_part: slice | None = None, source_part: slice | None = None) -> Event:
        """Copy a buffer, or elements of it, on `lane`. Both have the same dtype."""
        into = target.tensor if target_part is None else target.tensor[target_part]
        out_of = source.tensor if source_part is None else source.tensor[source_part]
        return self.move(lane, lambda: _copy(into, out_of), into.numel() * into.element_size(), target, source)

    def move(self, lane: str, work: Work, num_bytes: int, target: Buffer, source: Buffer) -> Event:
        """Launch work that moves bytes and nothing else; they are counted. It does nothing while `transfers` is off."""
        if not self.transfers:
            return self.launch(lane, _nothing, reads=[source], writes=[target])
        self.bytes_moved[lane] += num_bytes
        return self.launch(lane, work, reads=[source], writes=[target], num_bytes=num_bytes)

    def release(self, lane: str, buffer: Buffer) -> None:
        """Say that nothing that `buffer` holds will be read again. In the debug mode it is poisoned."""
        if self.debug.poison:
            self.launch(lane, lambda: poison(buffer.tensor), writes=[buffer])

    def wait(self, event: Event | None, reason: str = "ring") -> None:
        """Block the host until `event` is over; its failure is raised here."""

    def limit_memory(self, num_bytes: int) -> None:
        """Device memory that torch may take, the context not counted; OutOfVramError instead of more."""

    def synchronize(self) -> None:
        """Block the host until every lane is empty; failures of the host's lanes are raised here."""

    def close(self) -> None:
        """End the lanes. Work that was launched is finished first."""

    def empty(self, num_elements: int, dtype: torch.dtype, name: str) -> Buffer:
        """Device memory that the engine owns. OutOfVramError when there is none."""
        return Buffer(torch.empty(num_elements, dtype=dtype, device=self.torch_device), name)

    def seed(self, value: int) -> None:
        """Seed the generators that dropout and the like draw from; called inside work."""
        torch.default_generator.manual_seed(value)

    def take_counters(self) -> tuple[dict[str, int], dict[str, float]]:
        """Bytes moved and seconds waited since the last call."""
        counters = dict(self.bytes_moved), dict(self.waits_s)
        self.bytes_moved.clear()
        self.waits_s.clear()
        return counters

    # -- what a device is

    def _submit(self, lane: str, work: Work, before: list[Event]) -> Event:
        work()
        return Event(lane)


class CudaDevice(Device):
    """A GPU with a stream per lane; the lanes of the host are one thread each."""

    _stream_lanes = frozenset((COMPUTE, H2D, D2H))

    def __init__(self, torch_device: torch.device, debug: Debug | None = None) -> None:
        super().__init__(debug)
        self.torch_device = torch_device
        self._streams = {lane: torch.cuda.Stream(torch_device) for lane in (COMPUTE, H2D, D2H)}
        self._executors = {lane: _executor(lane) for lane in _WAITS}
        self._last: dict[str, Future[None]] = {}  # of each lane of the host
        self._failures: list[BaseException] = []  # of these lanes
        self._random = random.Random(0)

    def _submit(self, lane: str, work: Work, before: list[Event]) -> Event:
        if lane in self._executors:
            self._last[lane] = self._executors[lane].submit(self._run_on_host, work, before)
            return Event(lane, future=self._last[lane])
        stream = self._streams[lane]
        for other in before:
            if other.future is not None:
                self.wait(other, _WAITS[other.lane])
            elif other.lane != lane:
                stream.wait_event(other.cuda)
        with torch.cuda.stream(stream):
            if self.debug.delay and self._random.random() < 0.3:
                torch.cuda._sleep(self._random.randrange(200_000))
            try:
                work()
            except torch.cuda.OutOfMemoryError as error:
                raise OutOfVramError(_first_line(error), "Lower the VRAM limit of the plan, or close programs that hold VRAM.") from error
            done = torch.cuda.Event()
            done.record(stream)
        return Event(lane, cuda=done)

    def _run_on_host(self, work: Work, before: list[Event]) -> None:
        try:
            for other in before:
                if other.cuda is not None:
                    other.cuda.synchronize()
                elif other.future is not None:
                    other.future.result()  # what depends on failed work must not run
            work()
        except BaseException as error:
            self._failures.append(error)
            raise

    def wait(self, event: Event | None, reason: str = "ring") -> None:
        if event is None:
            return
        start = time.perf_counter()
        if event.future is not None:
            event.future.result()
        elif event.cuda is not None:
            event.cuda.synchronize()
        self.waits_s[reason] += time.perf_counter() - start
        if self.timeline is not None:
            self.timeline.waited(reason, start)

    def limit_memory(self, num_bytes: int) -> None:
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), self.torch_device)

    def synchronize(self) -> None:
        for lane, last in self._last.items():
            start = time.perf_counter()
            last.exception()  # waits for the lane; what failed on it is raised below
            self.waits_s[_WAITS[lane]] += time.perf_counter() - start
        torch.cuda.synchronize(self.torch_device)
        if self._failures:
            raise self._failures[0]

    def close(self) -> None:
        for executor in self._executors.values():
            executor.shutdown(wait=True)
        torch.cuda.synchronize(self.torch_device)

    def empty(self, num_elements: int, dtype: torch.dtype, name: str) -> Buffer:
        try:
            return super().empty(num_elements, dtype, name)
        except torch.cuda.OutOfMemoryError as error:
            raise OutOfVramError(f"No VRAM for {name}: {_first_line(error)}", "Lower the VRAM limit of the plan.") from error

    def seed(self, value: int) -> None:
        torch.cuda.default_generators[self.torch_device.index or 0].manual_seed(value)


def _executor(lane: str) -> ThreadPoolExecutor:
    """One thread, which takes denormal numbers for zero: moments that fade would make updates ten times slower."""
    return ThreadPoolExecutor(1, thread_name_prefix=lane, initializer=partial(torch.set_flush_denormal, True))


def make_device(name: str) -> Device:
    """`cpu`, `cuda:0`, ... with the debug modes of the environment."""
    torch_device = torch.device(name)
    if torch_device.type == "cpu":
        return Device(read_debug())
    index = torch_device.index or 0
    if sys.platform == "linux" and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # fewer holes; read when CUDA is first used
    torch.cuda.set_device(index)
    return CudaDevice(torch.device("cuda", index), read_debug())


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN (all bits set: NaN in every float format, also when viewed as another type)."""
    tensor.view(torch.uint8).fill_(255)


def _nothing() -> None:
    pass


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
