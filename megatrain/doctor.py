"""Checks of this computer: what was found, what it should be, and the command or step that mends it.

Each check is a small function of the machine and the workspace. torch is asked in a process of its own, so that neither
the page nor the command line loads it.
"""

import os
import platform as system
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from megatrain.hardware import Machine, nearest_folder, torch_version
from megatrain.platform import is_wsl, pinned_limit_bytes
from megatrain.units import GIB, format_bytes, format_rate, three_digits

OLDEST_PYTHON = (3, 11)
TORCH_PIN = "2.13.0"  # as requirements.txt pins it
TORCH_INDEX = "https://download.pytorch.org/whl"
NEW_CUDA, OLD_CUDA = "cu130", "cu126"  # builds of torch
NEW_CUDA_DRIVER, OLD_CUDA_DRIVER = 580, 525  # oldest drivers that carry them (CUDA's minor-version compatibility)
NEW_CUDA_CAPABILITY = (7, 5)  # CUDA 13 has no kernels for older cards
SMALL_DISK_BYTES = 20 * GIB
SMALL_RAM_BYTES = 8 * GIB
MOSTLY_FREE = 0.9
PROBE_TIMEOUT_S = 180.0  # it takes 13 s on two idle cores
ASK_TORCH = """
import torch
print(torch.__version__, torch.version.cuda, torch.cuda.is_available(), torch.cuda.device_count(), sep="|")
"""


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    WARNING = "warning"  # works, with less
    ERROR = "error"  # does not work


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fix` is a command or a step, empty when nothing is to be done."""

    check: str
    level: Level
    found: str
    wanted: str
    fix: str = ""


def examine(machine: Machine, workspace: Path) -> list[Finding]:
    """Every check, in order. Takes some seconds: torch is loaded by another process."""
    return [check(machine, workspace) for check in CHECKS]


def check_python(machine: Machine, workspace: Path) -> Finding:
    found = system.python_version()
    wanted = f"{'.'.join(map(str, OLDEST_PYTHON))} or newer"
    if sys.version_info >= OLDEST_PYTHON:
        return Finding("Python", Level.OK, found, wanted)
    return Finding("Python", Level.ERROR, found, wanted, "Install a newer Python and make a new virtual environment with it.")


def check_torch(machine: Machine, workspace: Path) -> Finding:
    """torch loads, and uses the GPU if there is one."""
    wanted = "PyTorch for CUDA that sees the GPU" if machine.gpus else "PyTorch"
    if torch_version() is None:
        return Finding("PyTorch", Level.ERROR, "not installed", wanted, torch_command(machine))
    answer = _ask_torch()
    if isinstance(answer, str):
        return Finding("PyTorch", Level.ERROR, f"cannot be loaded: {answer}", wanted, torch_command(machine))
    version, cuda, available, count = answer
    found = f"{version}, {f'built for CUDA {cuda}' if cuda else 'built for the CPU only'}"
    if not machine.gpus:
        return Finding("PyTorch", Level.OK, found, wanted)
    if not cuda:
        return Finding("PyTorch", Level.ERROR, f"{found}, but a GPU is here", wanted, torch_command(machine))
    if not available:
        fix = "Update the NVIDIA driver and restart the computer; or: " + torch_command(machine)
        return Finding("PyTorch", Level.ERROR, f"{found}, but it does not see the GPU", wanted, fix)
    return Finding("PyTorch", Level.OK, f"{found}, sees {count} GPU{'s' if count > 1 else ''}", wanted)


def _ask_torch() -> tuple[str, str | None, bool, int] | str:
    """(version, CUDA version, CUDA usable, GPUs) as a fresh process sees them, or why it failed."""
    try:
        done = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=120, check=False)
    except (subprocess.TimeoutExpired, OSError) as error:
        return " ".join(str(error).split())[:200]
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode != 0 or not lines:
        return lines[-1][:300] if lines else f"exit code {done.returncode}"
    version, cuda, available, count = lines[-1].split("|")
    return version, None if cuda == "None" else cuda, available == "True", int(count)


def torch_command(machine: Machine) -> str:
    """The exact pip command for this machine: with a GPU the newest CUDA build that its driver and its card carry."""
    pip = f'"{sys.executable}" -m pip install --force-reinstall torch=={TORCH_PIN}'
    if not machine.gpus:
        return f"{pip} --index-url {TORCH_INDEX}/cpu"
    driver, capability = _driver_number(machine), machine.gpus[0].compute_capability
    old = (driver is not None and driver < NEW_CUDA_DRIVER) or (capability is not None and capability < NEW_CUDA_CAPABILITY)
    return f"{pip} --index-url {TORCH_INDEX}/{OLD_CUDA if old else NEW_CUDA}"


def _driver_number(machine: Machine) -> int | None:
    first = (machine.driver_version or "").split(".")[0]
    return int(first) if first.isdigit() else None


def check_driver(machine: Machine, workspace: Path) -> Finding:
    """The NVIDIA driver answers and is new enough for a current build of torch."""
    wanted = f"{OLD_CUDA_DRIVER} or newer, with an NVIDIA card"
    if machine.notes:
        fix = "Reinstall the NVIDIA driver and restart the computer."
        return Finding("NVIDIA driver", Level.WARNING, " ".join(machine.notes), wanted, fix)
    if not machine.gpus:
        return Finding("NVIDIA driver", Level.OK, "no NVIDIA card: training uses the CPU", wanted)
    number = _driver_number(machine)
    if number is not None and number < OLD_CUDA_DRIVER:
        return Finding("NVIDIA driver", Level.ERROR, str(machine.driver_version), wanted, "Install a newer driver from nvidia.com/drivers.")
    return Finding("NVIDIA driver", Level.OK, machine.driver_version or "version not readable", wanted)


def check_vram(machine: Machine, workspace: Path) -> Finding:
    """VRAM is free, and who holds the rest."""
    if not machine.gpus:
        return Finding("VRAM", Level.OK, "no GPU", "mostly free")
    parts, crowded = [], False
    for gpu in machine.gpus:
        crowded |= gpu.free_bytes < MOSTLY_FREE * gpu.total_bytes
        holders = [f"{p.name} {format_bytes(p.used_bytes)}" if p.used_bytes else p.name for p in gpu.processes[:5]]
        held = f"; held by {', '.join(holders)}" if holders else ""
        parts.append(f"{gpu.name}: {format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free{held}")
    fix = "Close the programs that hold it: they leave less for training." if crowded else ""
    return Finding("VRAM", Level.WARNING if crowded else Level.OK, "; ".join(parts), "mostly free", fix)


def check_ram(machine: Machine, workspace: Path) -> Finding:
    found = f"{format_bytes(machine.ram_available_bytes)} of {format_bytes(machine.ram_total_bytes)} free"
    wanted = f"{format_bytes(SMALL_RAM_BYTES)} or more free"
    if machine.ram_available_bytes < SMALL_RAM_BYTES:
        return Finding("RAM", Level.WARNING, found, wanted, "Close other programs, or choose a small model.")
    return Finding("RAM", Level.OK, found, wanted)


def check_disk(machine: Machine, workspace: Path) -> Finding:
    found = f"{format_bytes(machine.disk_free_bytes)} of {format_bytes(machine.disk_total_bytes)} free for {workspace}"
    wanted = f"{format_bytes(SMALL_DISK_BYTES)} or more free"
    if machine.disk_free_bytes < SMALL_DISK_BYTES:
        return Finding("Disk", Level.WARNING, found, wanted, "Free space, or put the workspace on another disk with --workspace.")
    return Finding("Disk", Level.OK, found, wanted)


def check_workspace(machine: Machine, workspace: Path) -> Finding:
    """The workspace, or the folder it will be made in, takes files."""
    folder = nearest_folder(workspace)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fix = "Choose a folder of your own with --workspace or MEGATRAIN_WORKSPACE."
        return Finding("Workspace", Level.ERROR, f"{workspace} cannot be written: {error.strerror or error}", "writable", fix)
    return Finding("Workspace", Level.OK, str(workspace), "writable")


def check_link(machine: Machine, workspace: Path) -> Finding:
    """Every card uses all lanes of its slot."""
    wanted = "every lane that the card has"
    if not machine.gpus:
        return Finding("Bus", Level.OK, "not needed without a GPU", wanted)
    found, narrow = [], False
    for gpu in machine.gpus:
        found.append(f"{gpu.device}: PCIe {gpu.pcie_generation or '?'} with {gpu.pcie_width_now or '?'} of {gpu.pcie_width or '?'} lanes")
        narrow |= bool(gpu.pcie_width_now and gpu.pcie_width and gpu.pcie_width_now < gpu.pcie_width)
    fix = "Put the card in a slot with all lanes: streaming is as fast as the bus. Some cards drop lanes while they are idle."
    return Finding("Bus", Level.WARNING if narrow else Level.OK, "; ".join(found), wanted, fix if narrow else "")


def check_compiler(machine: Machine, workspace: Path) -> Finding:
    """Kernels can be compiled for the card: plain operations are slower and take more VRAM."""
    wanted = "Triton and a C compiler"
    if not machine.gpus:
        return Finding("Compiler", Level.OK, "not needed without a GPU", wanted)
    if machine.can_compile:
        return Finding("Compiler", Level.OK, "found", wanted)
    fix = "Install gcc (Debian and Ubuntu: sudo apt install gcc). On Windows PyTorch comes without Triton; WSL2 has it."
    return Finding("Compiler", Level.WARNING, "one is missing: training takes plain operations, slower and with more VRAM", wanted, fix)


def check_speed(machine: Machine, workspace: Path) -> Finding:
    """What plans are made with: measured rates, or estimates. The disk is the offload folder's."""
    device = machine.auto_device
    rates = machine.device_rates(device)
    compute = ", ".join(f"{name} {_flops(rate)}" for name, rate in rates.compute_flops_per_s.items())
    parts = [f"{device}: {compute}"]
    if machine.gpus:
        parts.append(f"bus {format_rate(rates.h2d_bytes_per_s)} down, {format_rate(rates.d2h_bytes_per_s)} up")
    parts.append(f"optimizer's memory {format_rate(rates.host_bytes_per_s)}")
    parts.append(f"disk {format_rate(rates.disk_read_bytes_per_s)} read, {format_rate(rates.disk_write_bytes_per_s)} write")
    if rates.measured:
        return Finding("Speed", Level.OK, "; ".join(parts) + " (measured)", "measured")
    return Finding("Speed", Level.OK, "; ".join(parts) + " (estimated)", "measured", "python -m megatrain doctor --measure")


def _flops(per_s: float) -> str:
    return f"{three_digits(per_s / 1e12)} TFLOP/s" if per_s >= 1e12 else f"{three_digits(per_s / 1e9)} GFLOP/s"


def measure(workspace: Path) -> str:
    """Measure this machine's speed in a process of its own and keep it for plans. Returns why that failed, empty when it did not."""
    arguments = [sys.executable, "-P", "-m", "megatrain.probe", str(workspace.expanduser().absolute())]
    path = os.pathsep.join(filter(None, (str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH"))))
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ, "PYTHONPATH": path}
    try:
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (subprocess.TimeoutExpired, OSError) as error:
        return " ".join(str(error).split())[:200]
    if done.returncode == 0:
        return ""
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return lines[-1][:300] if lines else f"exit code {done.returncode}"


def check_pinned(machine: Machine, workspace: Path) -> Finding:
    """How much memory the system lets the GPU's copy engines use."""
    wanted = "no limit set"
    if not machine.gpus:
        return Finding("Pinned memory", Level.OK, "not needed without a GPU", wanted)
    limit = pinned_limit_bytes(machine.ram_total_bytes)
    if os.name == "nt" or is_wsl():
        found = f"Windows refuses beyond about {format_bytes(limit)}; what lies above it is copied more slowly"
        return Finding("Pinned memory", Level.WARNING, found, wanted, "Run under Linux for the largest models.")
    locked = _locked_memory_limit()
    if locked is not None and locked < limit:
        found = f"the shell limits locked memory to {format_bytes(locked)}; the NVIDIA driver usually ignores that"
        fix = "If pinning is refused: ulimit -l unlimited (in a container: --ulimit memlock=-1)."
        return Finding("Pinned memory", Level.OK, found, wanted, fix)
    return Finding("Pinned memory", Level.OK, f"up to about {format_bytes(limit)}", wanted)


def _locked_memory_limit() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def check_packages(machine: Machine, workspace: Path) -> Finding:
    """What requirements.txt asks for is installed; versions are read, nothing is imported."""
    fix = f'"{sys.executable}" -m pip install -r requirements.txt'
    found, problems = [], []
    for name, oldest in OLDEST_PACKAGES.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            problems.append(f"{name} is missing")
            continue
        found.append(f"{name} {version}")
        if _numbers(version) < _numbers(oldest):
            problems.append(f"{name} {version} is older than {oldest}")
    wanted = ", ".join(f"{name} {oldest}+" for name, oldest in OLDEST_PACKAGES.items())
    if problems:
        return Finding("Packages", Level.ERROR, "; ".join(problems), wanted, fix)
    return Finding("Packages", Level.OK, ", ".join(found), wanted)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, enough to compare releases."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


OLDEST_PACKAGES = {
    "transformers": "5.17",
    "datasets": "5.2",
    "safetensors": "0.8",
    "gradio": "6.31",
    "plotly": "7.1",
}

CHECKS: tuple[Callable[[Machine, Path], Finding], ...] = (
    check_python,
    check_packages,
    check_torch,
    check_driver,
    check_vram,
    check_ram,
    check_disk,
    check_workspace,
    check_pinned,
    check_link,
    check_compiler,
    check_speed,
)
