"""Readings of cards through a stand-in for NVML: units, directions, and that a missing reading is None and never 0."""

import os
import sys

import pytest

from megatrain.telemetry.gpu import GpuReader
from tests.telemetry import fake_pynvml

READINGS = {"vram_used_bytes", "utilization", "pcie_up_bytes_per_s", "pcie_down_bytes_per_s", "power_w",
            "temperature_c", "clock_hz", "throttle"}  # fmt: skip


def test_units_and_directions(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml.make())
    values = GpuReader().read()
    assert set(values) == {f"gpu{index}_{name}" for index in (0, 1) for name in READINGS} | {"process_vram_bytes"}
    assert values["gpu0_vram_used_bytes"] == 1 << 30
    assert values["gpu1_vram_used_bytes"] == 2 << 30
    assert values["gpu0_utilization"] == 0.5
    assert values["gpu0_pcie_up_bytes_per_s"] == 100_000  # the card transmits
    assert values["gpu0_pcie_down_bytes_per_s"] == 200_000
    assert values["gpu0_power_w"] == pytest.approx(250.5)
    assert values["gpu0_clock_hz"] == 1.5e9
    assert values["gpu0_throttle"] == 4
    assert values["process_vram_bytes"] == 3 << 20


def test_cards_are_read_in_the_order_that_cuda_numbers_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml.make())
    values = GpuReader(["GPU-b"]).read()
    assert values["gpu0_vram_used_bytes"] == 2 << 30
    assert "gpu1_vram_used_bytes" not in values
    assert set(GpuReader([]).read()) == set()


@pytest.mark.parametrize("refused", [
    "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetClockInfo", "nvmlDeviceGetPcieThroughput",
    "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature", "nvmlDeviceGetComputeRunningProcesses",
])  # fmt: skip
def test_a_refused_reading_is_none_and_the_others_stay(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml.make(refused=(refused,)))
    values = GpuReader(["GPU-a"]).read()
    missing = [key for key, value in values.items() if value is None]
    assert 1 <= len(missing) <= 2
    assert 0 not in values.values()


def test_old_drivers_know_throttle_reasons_by_another_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml.make(missing=("nvmlDeviceGetCurrentClocksEventReasons",)))
    assert GpuReader(["GPU-a"]).read()["gpu0_throttle"] == 8


def test_a_card_that_is_lost_has_no_readings(monkeypatch):
    everything = tuple(name for name in vars(fake_pynvml.make()) if name.startswith("nvmlDevice") and "Handle" not in name)
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml.make(refused=everything, error=fake_pynvml.NVMLError_GpuIsLost))
    assert set(GpuReader(["GPU-a"]).read().values()) == {None}


def test_without_a_driver_there_are_no_cards(monkeypatch):
    module = fake_pynvml.make(refused=("nvmlInit",), error=fake_pynvml.NVMLError_LibraryNotFound)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    reader = GpuReader()
    assert reader.read() == {}
    assert reader.problem == ""
    assert "gives no readings" in GpuReader(["GPU-a"]).problem
    reader.close()


def test_without_the_package_the_problem_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "not installed" in GpuReader().problem
    assert GpuReader().read() == {}


def test_a_closed_reader_reads_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml.make())
    reader = GpuReader(pid=os.getpid())
    reader.close()
    assert reader.read() == {}


@pytest.mark.gpu
def test_a_real_card_has_readings():
    values = GpuReader().read()
    assert values["gpu0_vram_used_bytes"] > 0
