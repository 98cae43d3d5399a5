"""A stand-in for pynvml: two cards, of which some readings are missing, as on laptops, WSL and in containers."""

import os
import types


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


def make(refused: tuple[str, ...] = (), missing: tuple[str, ...] = (), error: type[NVMLError] = NVMLError_NotSupported) -> types.ModuleType:
    """A module in which the calls `refused` raise `error` and the calls `missing` do not exist."""
    module = types.ModuleType("pynvml")
    process = types.SimpleNamespace
    calls = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: {"GPU-a": 0, "GPU-b": 1}[uuid],
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=24 << 30, used=(handle + 1) << 30, free=0),
        "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=50, memory=10),
        "nvmlDeviceGetClockInfo": lambda handle, kind: 1500,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x4,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x8,
        "nvmlDeviceGetPcieThroughput": lambda handle, direction: {0: 100, 1: 200}[direction],
        "nvmlDeviceGetPowerUsage": lambda handle: 250_500,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
            process(pid=os.getpid(), usedGpuMemory=(handle + 1) << 20),
            process(pid=1, usedGpuMemory=7),
            process(pid=2, usedGpuMemory=None),
        ],
    }  # fmt: skip

    def refusal(*_args: object) -> None:
        raise error("Not Supported")

    for name, call in calls.items():
        if name not in missing:
            setattr(module, name, refusal if name in refused else call)
    for kind in (NVMLError, NVMLError_LibraryNotFound, NVMLError_NotSupported, NVMLError_GpuIsLost):
        setattr(module, kind.__name__, kind)
    module.NVML_CLOCK_SM, module.NVML_PCIE_UTIL_TX_BYTES, module.NVML_PCIE_UTIL_RX_BYTES, module.NVML_TEMPERATURE_GPU = 1, 0, 1, 0
    return module
