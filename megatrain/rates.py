"""How fast a machine is: documented estimates by device class, and the place where measured figures are kept."""

import dataclasses
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rates:
    """Sustained speeds of one device and of the host beside it. FLOP/s of whole layers, not of one matrix product."""

    compute_flops_per_s: dict[str, float]  # by compute dtype
    h2d_bytes_per_s: float  # one direction alone
    d2h_bytes_per_s: float
    duplex_bytes_per_s: float  # each direction while both run
    device_bytes_per_s: float  # device memory, read + written
    host_bytes_per_s: float  # host memory, read + written, by the optimizer's threads
    layer_overhead_s: float = 0.0  # starting the kernels of one layer's forward, recompute and backward; a floor for tiny layers
    disk_read_bytes_per_s: float = 1.5e9
    disk_write_bytes_per_s: float = 1.0e9
    measured: bool = False


LAYER_KERNELS = 200  # operations of one eager layer: about 50 forward, again in recompute, 100 backward


def cpu_rates(cores: int, bf16_units: bool = False) -> Rates:
    """Estimates for training on the CPU.

    An AVX2 core sustains 50 GFLOP/s in fp32 matrix products and 6 to 8 in bf16 (torch 2.13, AMD EPYC); whole layers
    reach about 60 % of it. Cores with bf16 instructions (`bf16_units`: AVX512-BF16, AMX) are no slower in bf16.
    """
    host = host_bytes_per_s(cores)
    copy = host / 2
    flops = {"float32": 30e9 * cores, "bfloat16": (40e9 if bf16_units else 4e9) * cores}
    return Rates(
        compute_flops_per_s=flops,
        h2d_bytes_per_s=copy,
        d2h_bytes_per_s=copy,
        duplex_bytes_per_s=copy / 2,
        device_bytes_per_s=host,
        host_bytes_per_s=host,
        layer_overhead_s=LAYER_KERNELS * 20e-6,
    )


def host_bytes_per_s(cores: int) -> float:
    """About 7 GB/s per core up to 60 GB/s: what two channels of desktop memory sustain under a fused optimizer."""
    return min(7e9 * cores, 60e9)


@dataclass(frozen=True)
class GpuReadings:
    """What NVML tells of a card's speed; each may be missing."""

    compute_capability: tuple[int, int] | None = None
    cuda_cores: int | None = None
    clock_mhz: int | None = None  # maximum of the multiprocessors
    pcie_generation: int | None = None  # maximum of the link
    pcie_width: int | None = None
    bus_bits: int | None = None  # width of the memory bus
    memory_mhz: int | None = None


def gpu_rates(readings: GpuReadings, cores: int) -> Rates:
    """Estimates; a missing reading is taken as that of a small card (RTX 3060 in a PCIe 3 x16 slot). `cores` are the CPU's.

    Dense bf16 with fp32 sums is 4 FLOP per CUDA core and clock on consumer cards (8.6, 8.9, 12.0), 32 on data-centre
    cards (8.0, 9.0, 10.0), 2 without bf16 units; whole layers sustain about 65 % and 50 % of it (RTX 4090: 150 of 165
    TFLOP/s at boost clock; H200 eager: 540 of 1070 TFLOP/s at maximum clock). fp32 is 2 FLOP, 70 % sustained. A PCIe
    lane carries 0.985 GB/s in generation 3 and doubles with each; copies reach 88 %, in both directions 83 % of that
    each. Memory: two transfers per clock, 85 % sustained.
    """
    capability = readings.compute_capability or (8, 6)
    per_s = (readings.cuda_cores or 3584) * (readings.clock_mhz or 1800) * 1e6
    data_centre = capability in ((8, 0), (9, 0), (10, 0), (10, 3))
    bf16 = per_s * (32 * 0.50 if data_centre else 4 * 0.65 if capability >= (8, 0) else 2 * 0.70)
    link = 0.985e9 * 2 ** ((readings.pcie_generation or 3) - 3) * (readings.pcie_width or 16) * 0.88
    memory = (readings.bus_bits or 192) / 8 * 2 * (readings.memory_mhz or 7500) * 1e6 * 0.85
    return Rates(
        compute_flops_per_s={"float32": per_s * 2 * 0.70, "bfloat16": bf16},
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        duplex_bytes_per_s=link * 0.83,
        device_bytes_per_s=memory,
        host_bytes_per_s=host_bytes_per_s(cores),
        layer_overhead_s=LAYER_KERNELS * 6e-6,
    )


def rates_file(workspace: Path) -> Path:
    """Where measured rates are kept: JSON, device ("cpu" or a GPU's UUID) -> Rates."""
    return workspace / "cache" / "rates.json"


def save_rates(workspace: Path, device: str, rates: Rates) -> None:
    """Keep measured rates of one device; `read_machine` uses them from now on."""
    path = rates_file(workspace)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {name: asdict(value) for name, value in measured_rates(workspace).items()}
    known[device] = asdict(dataclasses.replace(rates, measured=True))
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(known), "utf-8")
    os.replace(temporary, path)


def measured_rates(workspace: Path) -> dict[str, Rates]:
    """What was measured before; a damaged file counts as nothing measured, it is a cache."""
    try:
        raw = json.loads(rates_file(workspace).read_text("utf-8"))
        return {device: Rates(**rates) for device, rates in raw.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
