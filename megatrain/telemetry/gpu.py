"""Readings of NVIDIA cards through NVML. Any reading may be missing on a driver, laptop or WSL: it is None, never 0."""

import os
from collections.abc import Sequence
from typing import Any


class GpuReader:
    """Reads the given cards. Without NVML, driver or cards every reading is simply absent.

    `uuids` in the order in which CUDA numbers the cards; None reads every card that NVML knows. `pid` is the process
    whose own VRAM is reported.
    """

    def __init__(self, uuids: Sequence[str] | None = None, pid: int | None = None) -> None:
        self._pid = pid or os.getpid()
        self._handles: list[Any] = []
        self._nvml: Any = None
        self.problem = ""  # why there are no readings, in words; empty when there are, or when there is no card
        try:
            import pynvml
        except ImportError:
            self.problem = "nvidia-ml-py is not installed: graphics cards cannot be read."
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            if uuids:
                self.problem = f"The NVIDIA driver gives no readings: {error}."
            return
        self._nvml = pynvml
        self._handles = self._find(uuids)

    def _find(self, uuids: Sequence[str] | None) -> list[Any]:
        if uuids is None:
            return [self._ask("nvmlDeviceGetHandleByIndex", number) for number in range(self._ask("nvmlDeviceGetCount") or 0)]
        return [self._ask("nvmlDeviceGetHandleByUUID", uuid) for uuid in uuids]

    def read(self) -> dict[str, float | None]:
        """gpuN_vram_used_bytes, _utilization (0-1), _pcie_up/down_bytes_per_s, _power_w, _temperature_c, _clock_hz,
        _throttle (bits as NVML defines them), and process_vram_bytes over all cards."""
        values: dict[str, float | None] = {}
        own: list[int] = []
        for index, handle in enumerate(self._handles):
            if handle is None:
                continue
            values |= {f"gpu{index}_{name}": value for name, value in self._read_card(handle).items()}
            own += self._own_bytes(handle)
        if self._handles:
            values["process_vram_bytes"] = sum(own) if own else None
        return values

    def _read_card(self, handle: Any) -> dict[str, float | None]:
        nvml = self._nvml
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        use = self._ask("nvmlDeviceGetUtilizationRates", handle)
        clock_mhz = self._ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM)
        throttle = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if throttle is None:  # the name that drivers before 535 know
            throttle = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return {
            "vram_used_bytes": None if memory is None else memory.used,
            "utilization": None if use is None else use.gpu / 100,
            "pcie_up_bytes_per_s": self._pcie(handle, nvml.NVML_PCIE_UTIL_TX_BYTES),  # NVML looks from the card: it transmits
            "pcie_down_bytes_per_s": self._pcie(handle, nvml.NVML_PCIE_UTIL_RX_BYTES),
            "power_w": _scaled(self._ask("nvmlDeviceGetPowerUsage", handle), 1e-3),
            "temperature_c": self._ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            "clock_hz": _scaled(clock_mhz, 1e6),
            "throttle": throttle,
        }

    def _pcie(self, handle: Any, direction: int) -> float | None:
        """Mean over the last 20 ms, which NVML gives in KB/s; the call takes as long."""
        return _scaled(self._ask("nvmlDeviceGetPcieThroughput", handle, direction), 1000)

    def _own_bytes(self, handle: Any) -> list[int]:
        """VRAM of this process on one card; nothing where pids are hidden (containers) or not counted (Windows)."""
        found = self._ask("nvmlDeviceGetComputeRunningProcesses", handle) or []
        return [entry.usedGpuMemory for entry in found if entry.pid == self._pid and entry.usedGpuMemory is not None]

    def close(self) -> None:
        """Lets go of NVML."""
        if self._nvml is not None:
            self._ask("nvmlShutdown")
            self._handles, self._nvml = [], None

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, name)(*arguments)
        except (self._nvml.NVMLError, AttributeError):  # AttributeError: the library is older than the call
            return None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
