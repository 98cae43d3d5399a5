"""Reading the machine: container limits, missing readings, choice of cards, rates."""

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megatrain import hardware, rates
from megatrain.errors import ConfigError, MegaTrainError
from megatrain.hardware import Machine, read_machine, read_ram, with_offload
from megatrain.rates import GpuReadings, Rates, cpu_rates, gpu_rates, save_rates
from megatrain.units import GIB, MIB
from tests.shapes import H200, RTX_4090, machine


class Memory:
    total, available = 64 * GIB, 40 * GIB


@pytest.fixture
def ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hardware.RAM_OVERRIDE, raising=False)
    monkeypatch.setattr(hardware.psutil, "virtual_memory", Memory)


def write(root: Path, files: dict[str, Any]) -> Path:
    for name, value in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n", "utf-8")
    return root


def test_a_machine_is_read_whatever_it_has(tmp_path: Path):
    found = read_machine(tmp_path / "not" / "made" / "yet")
    assert found.ram_total_bytes >= found.ram_available_bytes > 0
    assert found.cpu_cores >= 1
    assert found.disk_free_bytes > 0
    assert Machine.from_json(found.to_json()) == found


def test_json_keeps_everything():
    whole = machine(24, gpus=2)
    card = dataclasses.replace(whole.gpus[0], compute_capability=(8, 9), processes=(hardware.GpuProcess(7, "chrome", None),))
    whole = dataclasses.replace(whole, gpus=(card, whole.gpus[1]), notes=("a note",))
    assert Machine.from_json(json.dumps(json.loads(whole.to_json()))) == whole


# ---- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("ram")
def test_without_a_container_the_machine_counts(tmp_path: Path):
    assert read_ram(tmp_path) == (64 * GIB, 40 * GIB)
    assert read_ram(write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"})) == (64 * GIB, 40 * GIB)


@pytest.mark.usefixtures("ram")
def test_a_container_limit_of_version_2(tmp_path: Path):
    files = {
        "proc/self/cgroup": "0::/user/job",
        "sys/fs/cgroup/user/memory.max": 16 * GIB,
        "sys/fs/cgroup/user/memory.current": 6 * GIB,
        "sys/fs/cgroup/user/memory.stat": f"anon 1\ninactive_file {2 * GIB}",
        "sys/fs/cgroup/user/job/memory.max": "max",
        "sys/fs/cgroup/user/job/memory.current": GIB,
    }
    assert read_ram(write(tmp_path, files)) == (16 * GIB, 12 * GIB)  # files that can be dropped do not count as used


@pytest.mark.usefixtures("ram")
def test_inside_a_container_the_limit_stands_at_the_top(tmp_path: Path):
    files = {
        "proc/self/cgroup": "0::/docker/abc",
        "sys/fs/cgroup/memory.max": 8 * GIB,
        "sys/fs/cgroup/memory.current": 512 * MIB,
    }
    assert read_ram(write(tmp_path, files)) == (8 * GIB, 7680 * MIB)


@pytest.mark.usefixtures("ram")
def test_a_container_limit_of_version_1(tmp_path: Path):
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/job",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 10 * GIB,
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": 11 * GIB,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 11 * GIB,
    }
    assert read_ram(write(tmp_path, files)) == (10 * GIB, 0)


@pytest.mark.usefixtures("ram")
def test_the_variable_overrides_what_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(hardware.RAM_OVERRIDE, str(128 * GIB))
    assert read_ram() == (128 * GIB, 128 * GIB)
    monkeypatch.setenv(hardware.RAM_OVERRIDE, "128 GB")
    with pytest.raises(MegaTrainError, match="no number of bytes"):
        read_ram()


# ---- torch -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "cuda"), [
    ("cuda: Optional[str] = '13.0'\nhip = None", "13.0"),
    ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None", None),
    ("cuda = '12.6'", "12.6"),
    ("", None),
])  # fmt: skip
def test_the_build_of_torch_is_read_without_loading_it(text: str, cuda: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, {"torch/version.py": text, "torch/__init__.py": "raise SystemExit('loaded')"})
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "torch")])
    monkeypatch.setattr(hardware.util, "find_spec", lambda name: spec)
    assert hardware.read_torch_cuda() == cuda


def test_without_torch_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware.util, "find_spec", lambda name: None)
    assert hardware.read_torch_cuda() is None


def test_the_installed_torch_agrees():
    import torch

    assert hardware.read_torch_cuda() == torch.version.cuda
    assert hardware.torch_version() == torch.__version__


# ---- cards -----------------------------------------------------------------------------------------------------------
class FakeNvml(types.ModuleType):
    """Stands in for pynvml: cards with UUIDs GPU-a, GPU-b, ...; readings named in `refused` are not supported."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801
        pass

    class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    def __init__(self, cards: int, refused: tuple[str, ...] = ()) -> None:
        super().__init__("pynvml")
        self.cards, self.refused, self.open = cards, refused, 0
        self.readings: dict[str, Any] = {
            "SystemGetDriverVersion": lambda: "580.65.06",
            "DeviceGetCount": lambda: self.cards,
            "DeviceGetHandleByIndex": lambda index: index,
            "DeviceGetMemoryInfo": lambda card: types.SimpleNamespace(total=24 * GIB, free=(20 - card) * GIB),
            "DeviceGetUUID": lambda card: f"GPU-{'abcdefgh'[card]}",
            "DeviceGetName": lambda card: b"Card of bytes" if card else "Card",
            "DeviceGetCudaComputeCapability": lambda card: (8, 9),
            "DeviceGetNumGpuCores": lambda card: 16384,
            "DeviceGetMaxClockInfo": lambda card, kind: 3105 if kind == 1 else 10501,
            "DeviceGetMaxPcieLinkGeneration": lambda card: 4,
            "DeviceGetMaxPcieLinkWidth": lambda card: 16,
            "DeviceGetMemoryBusWidth": lambda card: 384,
            "DeviceGetComputeRunningProcesses": lambda card: [types.SimpleNamespace(pid=1, usedGpuMemory=GIB)],
            "DeviceGetGraphicsRunningProcesses": lambda card: [types.SimpleNamespace(pid=1, usedGpuMemory=None)],
        }

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def __getattr__(self, name: str) -> Any:
        reading = name.removeprefix("nvml")
        if not name.startswith("nvml") or reading not in self.__dict__["readings"]:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            if reading in self.refused:
                raise self.NVMLError("Not Supported")
            return self.readings[reading](*arguments)

        return call


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(cards: int, refused: tuple[str, ...] = ()) -> FakeNvml:
        fake = FakeNvml(cards, refused)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    monkeypatch.delenv(hardware.VISIBLE_GPUS, raising=False)
    return install


def test_cards_are_read(nvml: Any, tmp_path: Path):
    fake = nvml(2)
    found = read_machine(tmp_path)
    assert [gpu.device for gpu in found.gpus] == ["cuda:0", "cuda:1"]
    assert found.gpus[1].name == "Card of bytes"
    assert found.gpus[0].free_bytes == 20 * GIB
    assert found.gpus[0].rates == gpu_rates(dataclasses.replace(RTX_4090), found.cpu_cores)
    assert len(found.gpus[0].processes) == 1
    assert found.driver_version == "580.65.06"
    assert fake.open == 0
    assert Machine.from_json(found.to_json()) == found


def test_every_other_reading_may_be_missing(nvml: Any, tmp_path: Path):
    fake = nvml(1)
    vital = {"DeviceGetCount", "DeviceGetHandleByIndex", "DeviceGetMemoryInfo"}
    nvml(1, tuple(set(fake.readings) - vital))
    found = read_machine(tmp_path)
    assert found.gpus[0].name == "GPU"
    assert found.gpus[0].compute_capability is None
    assert found.gpus[0].processes == ()
    assert found.gpus[0].rates.h2d_bytes_per_s > 0
    assert found.driver_version is None


def test_an_old_library_lacks_calls(nvml: Any, tmp_path: Path):
    fake = nvml(1)
    del fake.readings["DeviceGetNumGpuCores"], fake.readings["DeviceGetMemoryBusWidth"]
    assert len(read_machine(tmp_path).gpus) == 1


def test_a_driver_that_fails_is_noted_and_the_machine_read(nvml: Any, tmp_path: Path):
    nvml(1, ("DeviceGetMemoryInfo",))
    found = read_machine(tmp_path)
    assert found.gpus == ()
    assert "stopped answering" in found.notes[0]


def test_no_driver_is_no_fault(nvml: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = nvml(1)

    def missing() -> None:
        raise fake.NVMLError_LibraryNotFound("NVML Shared Library Not Found")

    monkeypatch.setattr(fake, "nvmlInit", missing, raising=False)
    found = read_machine(tmp_path)
    assert (found.gpus, found.notes) == ((), ())


@pytest.mark.parametrize(("setting", "chosen"), [
    ("1,0", ["GPU-b", "GPU-a"]), ("GPU-c", ["GPU-c"]), ("0,7,1", ["GPU-a"]), ("", []), ("-1", []), ("2, 1", ["GPU-c", "GPU-b"]),
])  # fmt: skip
def test_cards_are_numbered_as_cuda_does(setting: str, chosen: list[str], nvml: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nvml(3)
    monkeypatch.setenv(hardware.VISIBLE_GPUS, setting)
    found = read_machine(tmp_path)
    assert [gpu.uuid for gpu in found.gpus] == chosen
    assert [gpu.index for gpu in found.gpus] == list(range(len(chosen)))


def test_auto_takes_the_first_card_that_torch_can_use():
    assert machine(24, gpus=2).auto_device == "cuda:0"
    assert machine(0).auto_device == "cpu"
    assert dataclasses.replace(machine(24), torch_cuda=None).auto_device == "cpu"
    assert machine(24).rates == machine(24).gpus[0].rates
    assert machine(0).rates == cpu_rates(8)


# ---- rates -----------------------------------------------------------------------------------------------------------
def test_estimates_are_near_what_was_measured():
    """An H200: 544 TFLOP/s of whole eager layers, 55.3 GB/s a direction, 46 both ways, 4.2 TB/s. An RTX 4090: 150 TFLOP/s, 25 GB/s."""
    big, small = gpu_rates(H200, 16), gpu_rates(RTX_4090, 8)
    assert big.compute_flops_per_s["bfloat16"] == pytest.approx(544e12, rel=0.1)
    assert big.compute_flops_per_s["float32"] == pytest.approx(51e12, rel=0.1)
    assert big.h2d_bytes_per_s == pytest.approx(55.3e9, rel=0.05)
    assert big.duplex_bytes_per_s == pytest.approx(46e9, rel=0.05)
    assert big.device_bytes_per_s == pytest.approx(4.2e12, rel=0.05)
    assert small.compute_flops_per_s["bfloat16"] == pytest.approx(150e12, rel=0.15)
    assert small.h2d_bytes_per_s == pytest.approx(25e9, rel=0.15)
    assert gpu_rates(GpuReadings(compute_capability=(7, 5)), 8).compute_flops_per_s["bfloat16"] > 0


def test_measured_rates_replace_the_estimates(nvml: Any, tmp_path: Path):
    nvml(2)
    measured = dataclasses.replace(cpu_rates(4), h2d_bytes_per_s=123.0)
    save_rates(tmp_path, "GPU-b", measured)
    save_rates(tmp_path, "cpu", measured)
    found = read_machine(tmp_path)
    assert found.gpus[1].rates == found.cpu_rates == dataclasses.replace(measured, measured=True)
    assert not found.gpus[0].rates.measured


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cpu": {"nonsense": 1}}', '{"cpu": 3}'])
def test_a_damaged_cache_counts_as_nothing_measured(text: str, tmp_path: Path):
    write(tmp_path, {"cache/rates.json": text})
    assert not read_machine(tmp_path).cpu_rates.measured
    save_rates(tmp_path, "cpu", Rates({}, 1, 1, 1, 1, 1))
    assert read_machine(tmp_path).cpu_rates.measured
    assert rates.rates_file(tmp_path).exists()


@pytest.mark.parametrize("folder", ["file/inside", "file", "a\0b", "~nobody-of-this-name/x", "x" * 5000])
def test_an_offload_folder_that_cannot_be_is_refused_by_name(folder: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    wanted = str(tmp_path / folder) if folder.startswith("file") else folder
    with pytest.raises(ConfigError, match="offload_folder"):
        with_offload(read_machine(tmp_path), tmp_path, wanted)


def test_the_offload_folder_need_not_exist_yet(tmp_path: Path):
    found = with_offload(read_machine(tmp_path), tmp_path, str(tmp_path / "new" / "folder"))
    assert found.offload_free_bytes > 0
    assert found.offload_on_workspace_disk
