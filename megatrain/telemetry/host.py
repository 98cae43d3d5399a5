"""Readings of the computer: memory, processor, the disk of the run, the worker's own memory. A reading may be missing."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil


class HostReader:
    """Reads host values; rates are those since the call before. `read_ram` returns (total, available) bytes.

    `folder` decides whose disk is watched; `pid` whose memory is the worker's (its children included).
    """

    def __init__(self, folder: Path, read_ram: Callable[[], tuple[int, int]] | None = None, pid: int | None = None) -> None:
        self._read_ram = read_ram or machine_ram
        self._process = psutil.Process(pid or os.getpid())
        self._disk = disk_name(folder)
        self._last: tuple[float, int, int] | None = None
        psutil.cpu_percent()  # the first call only sets the mark that later ones are measured from

    def read(self) -> dict[str, float | None]:
        """ram_used_bytes, worker_ram_bytes, cpu_utilization (0-1), disk_read_bytes_per_s, disk_write_bytes_per_s."""
        total, available = self._read_ram()
        read, write = self._disk_rates()
        return {
            "ram_used_bytes": total - available,
            "worker_ram_bytes": self._worker_bytes(),
            "cpu_utilization": psutil.cpu_percent() / 100,
            "disk_read_bytes_per_s": read,
            "disk_write_bytes_per_s": write,
        }

    def _worker_bytes(self) -> int | None:
        try:
            return self._process.memory_info().rss
        except psutil.Error:
            return None

    def _disk_rates(self) -> tuple[float | None, float | None]:
        try:
            counters = psutil.disk_io_counters(perdisk=True) or {}
        except (OSError, RuntimeError, NotImplementedError):  # psutil: no counters on this system
            return None, None
        now = time.monotonic()
        if self._disk not in counters:
            return None, None
        chosen = counters[self._disk]
        before, self._last = self._last, (now, chosen.read_bytes, chosen.write_bytes)
        if before is None or now <= before[0]:
            return None, None
        seconds = now - before[0]
        return max(0, chosen.read_bytes - before[1]) / seconds, max(0, chosen.write_bytes - before[2]) / seconds


def machine_ram() -> tuple[int, int]:
    """(total, available) bytes of the machine, container limits aside."""
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def disk_name(folder: Path) -> str | None:
    """The name under which the system counts the disk that holds `folder` (`nvme0n1p2`); None where that is unknown."""
    try:
        device = folder.stat().st_dev
        link = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
        return link.resolve(strict=True).name
    except (OSError, AttributeError):
        return None


def oom_kills() -> int | None:
    """Processes that the kernel has ended for lack of memory since boot; None where it does not count."""
    try:
        for line in Path("/proc/vmstat").read_text("utf-8").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        return None
    return None
