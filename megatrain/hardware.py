"""What this machine has and how fast it is: GPUs through NVML, memory with container limits, disk. Loads no torch.

Every reading may be missing (WSL, laptops, containers): it is None then, never 0.
"""

import json
import os
import platform as system
import shutil
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata, util
from pathlib import Path
from typing import Any

import psutil

from megatrain.errors import ConfigError, MegaTrainError
from megatrain.platform import can_compile
from megatrain.rates import GpuReadings, Rates, cpu_rates, gpu_rates, measured_rates
from megatrain.units import GIB

RAM_OVERRIDE = "MEGATRAIN_RAM_BYTES"  # plan as if this much memory were there and free
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
CPU = "cpu"


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU; `used_bytes` is None where the driver does not tell (Windows)."""

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """One GPU, numbered as CUDA numbers it under CUDA_DEVICE_ORDER=PCI_BUS_ID."""

    index: int
    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    rates: Rates
    compute_capability: tuple[int, int] | None = None
    pcie_generation: int | None = None  # the link's maximum
    pcie_width: int | None = None
    pcie_width_now: int | None = None
    processes: tuple[GpuProcess, ...] = ()

    @property
    def device(self) -> str:
        return f"cuda:{self.index}"


@dataclass(frozen=True)
class Machine:
    """One computer at one moment."""

    gpus: tuple[Gpu, ...]
    ram_total_bytes: int
    ram_available_bytes: int
    cpu_name: str
    cpu_cores: int  # that this process may use
    disk_total_bytes: int
    disk_free_bytes: int  # of the workspace
    cpu_rates: Rates
    system: str = ""
    driver_version: str | None = None
    torch_cuda: str | None = None  # CUDA version that the installed torch was built for; None: it cannot use a GPU
    can_compile: bool = True  # kernels for a GPU; see platform.can_compile
    notes: tuple[str, ...] = field(default=())  # what could not be read, in words
    offload_folder: str = ""  # where states may go that do not fit in RAM; see with_offload
    offload_total_bytes: int = 0  # of its disk
    offload_free_bytes: int = 0
    offload_on_workspace_disk: bool = True

    @property
    def auto_device(self) -> str:
        """The first GPU that torch can use, else the CPU."""
        return self.gpus[0].device if self.gpus and self.torch_cuda else CPU

    @property
    def rates(self) -> Rates:
        """Of the device that `auto` takes."""
        return self.device_rates(self.auto_device)

    def gpu(self, device: str) -> Gpu | None:
        """The GPU called `cuda:N`, if there is one."""
        return next((gpu for gpu in self.gpus if gpu.device == device), None)

    def device_rates(self, device: str) -> Rates:
        gpu = self.gpu(device)
        return gpu.rates if gpu else self.cpu_rates

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Machine":
        raw = json.loads(text)
        gpus = tuple(_gpu_from(entry) for entry in raw.pop("gpus"))
        return Machine(gpus=gpus, cpu_rates=Rates(**raw.pop("cpu_rates")), notes=tuple(raw.pop("notes")), **raw)


def _gpu_from(raw: dict[str, Any]) -> Gpu:
    capability = raw.pop("compute_capability")
    processes = tuple(GpuProcess(**entry) for entry in raw.pop("processes"))
    rates = Rates(**raw.pop("rates"))
    return Gpu(rates=rates, processes=processes, compute_capability=tuple(capability) if capability else None, **raw)


def read_machine(workspace: Path) -> Machine:
    """This computer now. `workspace` need not exist yet: its disk is that of the nearest folder above it."""
    total, available = read_ram()
    cores = _usable_cores()
    measured = measured_rates(workspace)
    gpus, driver, notes = _read_gpus(cores, measured)
    disk = shutil.disk_usage(nearest_folder(workspace))
    return Machine(
        gpus=gpus,
        ram_total_bytes=total,
        ram_available_bytes=available,
        cpu_name=_cpu_name(),
        cpu_cores=cores,
        disk_total_bytes=disk.total,
        disk_free_bytes=disk.free,
        cpu_rates=measured.get(CPU) or cpu_rates(cores, _has_bf16_units()),
        system=f"{system.system()} {system.release()}",
        driver_version=driver,
        torch_cuda=read_torch_cuda(),
        can_compile=can_compile(),
        notes=notes,
        offload_folder=str(workspace.expanduser().absolute() / "offload"),
        offload_total_bytes=disk.total,
        offload_free_bytes=disk.free,
    )


def with_offload(machine: Machine, workspace: Path, folder: str | None) -> Machine:
    """`machine` with the free space of the folder that a configuration names for offloaded states; ConfigError when it is none."""
    if not folder:
        return machine
    try:
        path = Path(folder).expanduser().absolute()
        if "\0" in folder:
            raise ValueError("holds a character that no file name may have")
        nearest, own = nearest_folder(path), nearest_folder(workspace)
        in_the_way = next((part for part in path.parents if part.exists() and not part.is_dir()), None)
        if in_the_way is not None or path.exists() and not path.is_dir():
            raise NotADirectoryError(f"{in_the_way or path} is a file")
        if not os.access(nearest, os.W_OK):
            raise PermissionError(f"{nearest} cannot be written")
        same = nearest.stat().st_dev == own.stat().st_dev
        disk = shutil.disk_usage(nearest)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError([("memory.offload_folder", reason)], "Choose a folder on a fast disk that you may write to.") from error
    return replace(
        machine, offload_folder=folder, offload_total_bytes=disk.total, offload_free_bytes=disk.free, offload_on_workspace_disk=same
    )


def nearest_folder(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    path = path.expanduser().absolute()
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path(path.anchor or "."))


# ---- memory ----------------------------------------------------------------------------------------------------------
def read_ram(root: Path = Path("/")) -> tuple[int, int]:
    """(total, available) bytes: the smaller of machine and container. `root` is where /proc and /sys are found."""
    override = os.environ.get(RAM_OVERRIDE)
    if override:
        if not override.isdigit() or int(override) == 0:
            raise MegaTrainError(f"{RAM_OVERRIDE}={override!r} is no number of bytes.", f"Set it like {16 * GIB}, or unset it.")
        return int(override), int(override)
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for limit, used in _container_limits(root):
        if limit < memory.total:
            total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def _container_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes that cannot be reclaimed) of every control group above this process, versions 2 and 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / path.strip("/")
        while True:  # inside a container the path may lead nowhere while the limit stands at the top
            limit, used = _read_number(folder / names[0]), _read_number(folder / names[1])
            if limit is not None and used is not None:
                found.append((limit, max(0, used - _read_stat(folder / "memory.stat", names[2]))))
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    return found


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text("utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _read_stat(path: Path, name: str) -> int:
    try:
        pairs = dict(line.split(" ", 1) for line in path.read_text("utf-8").splitlines())
        return int(pairs.get(name, 0))
    except (OSError, ValueError):
        return 0


# ---- processor and torch ---------------------------------------------------------------------------------------------
def _usable_cores() -> int:
    """Cores this process may run on, hyper-threads excluded when nothing restricts it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical))


def _cpu_name() -> str:
    return _cpuinfo("model name") or system.processor() or system.machine()


def _has_bf16_units() -> bool:
    return bool({"avx512_bf16", "amx_bf16"} & set(_cpuinfo("flags").split()))


def _cpuinfo(field_name: str) -> str:
    """One line of what Linux tells of the first core; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == field_name), "")


def read_torch_cuda() -> str | None:
    """The CUDA version in the installed torch's version.py, read as text; None for a CPU build or without torch."""
    spec = util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text("utf-8")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name.split(":")[0].strip() == "cuda":
            value = value.strip().strip("'\"")
            return None if value in ("None", "") else value
    return None


def torch_version() -> str | None:
    """The installed torch's version, without loading it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


# ---- GPUs ------------------------------------------------------------------------------------------------------------
def _read_gpus(cores: int, measured: dict[str, Rates]) -> tuple[tuple[Gpu, ...], str | None, tuple[str, ...]]:
    """(GPUs that CUDA_VISIBLE_DEVICES leaves, driver version, what went wrong)."""
    try:
        import pynvml
    except ImportError:
        return (), None, ("nvidia-ml-py is not installed: GPUs cannot be read.",)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        missing = isinstance(error, pynvml.NVMLError_LibraryNotFound | pynvml.NVMLError_DriverNotLoaded)
        return (), None, () if missing else (f"The NVIDIA driver does not answer: {error}.",)
    try:
        driver = _ask("SystemGetDriverVersion")
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        chosen = _visible(handles, os.environ.get(VISIBLE_GPUS))
        return tuple(_read_gpu(index, handle, cores, measured) for index, handle in enumerate(chosen)), driver, ()
    except pynvml.NVMLError as error:
        return (), None, (f"The NVIDIA driver stopped answering: {error}.",)
    finally:
        pynvml.nvmlShutdown()


def _visible(handles: list[Any], setting: str | None) -> list[Any]:
    """The devices that `setting` names, in its order, as CUDA reads it: numbers or UUIDs, ending at the first wrong one."""
    import pynvml

    if setting is None:
        return handles
    chosen = []
    for name in (part.strip() for part in setting.split(",")):
        if name.isdigit():
            found = handles[int(name)] if int(name) < len(handles) else None
        else:
            found = next((handle for handle in handles if name and pynvml.nvmlDeviceGetUUID(handle).startswith(name)), None)
        if found is None:
            break
        chosen.append(found)
    return chosen


def _read_gpu(index: int, handle: Any, cores: int, measured: dict[str, Rates]) -> Gpu:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    uuid = _ask("DeviceGetUUID", handle) or ""
    capability = _ask("DeviceGetCudaComputeCapability", handle)
    readings = GpuReadings(
        compute_capability=tuple(capability) if capability else None,
        cuda_cores=_ask("DeviceGetNumGpuCores", handle),
        clock_mhz=_ask("DeviceGetMaxClockInfo", handle, pynvml.NVML_CLOCK_SM),
        pcie_generation=_ask("DeviceGetMaxPcieLinkGeneration", handle),
        pcie_width=_ask("DeviceGetMaxPcieLinkWidth", handle),
        bus_bits=_ask("DeviceGetMemoryBusWidth", handle),
        memory_mhz=_ask("DeviceGetMaxClockInfo", handle, pynvml.NVML_CLOCK_MEM),
    )
    return Gpu(
        index=index,
        name=_ask("DeviceGetName", handle) or "GPU",
        uuid=uuid,
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        rates=measured.get(uuid) or gpu_rates(readings, cores),
        compute_capability=readings.compute_capability,
        pcie_generation=readings.pcie_generation,
        pcie_width=readings.pcie_width,
        pcie_width_now=_ask("DeviceGetCurrPcieLinkWidth", handle),
        processes=_gpu_processes(handle),
    )


def _gpu_processes(handle: Any) -> tuple[GpuProcess, ...]:

    found: dict[int, GpuProcess] = {}
    for reading in ("DeviceGetComputeRunningProcesses", "DeviceGetGraphicsRunningProcesses"):
        for entry in _ask(reading, handle) or ():
            try:
                name = psutil.Process(entry.pid).name()
            except psutil.Error:
                name = f"process {entry.pid}"
            found.setdefault(entry.pid, GpuProcess(entry.pid, name, entry.usedGpuMemory))
    return tuple(sorted(found.values(), key=lambda process: -(process.used_bytes or 0)))


def _ask(reading: str, *arguments: Any) -> Any:
    """NVML's answer to nvml<reading>, or None where this driver, card or version of the library does not have it."""
    import pynvml

    try:
        value = getattr(pynvml, f"nvml{reading}")(*arguments)
    except (pynvml.NVMLError, AttributeError):
        return None
    return value.decode() if isinstance(value, bytes) else value
