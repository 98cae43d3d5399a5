"""Readings of this computer: present where the system tells, absent where not, and rates from counters."""

import os
import types

import psutil
import pytest

from megatrain.telemetry import host
from megatrain.telemetry.host import HostReader


def test_memory_is_what_is_not_available_within_the_limits(tmp_path):
    values = HostReader(tmp_path, read_ram=lambda: (1000, 300)).read()
    assert values["ram_used_bytes"] == 700
    assert values["worker_ram_bytes"] > 1_000_000
    assert 0 <= values["cpu_utilization"] <= 1
    assert 0 < HostReader(tmp_path).read()["ram_used_bytes"] < psutil.virtual_memory().total


def test_disk_rates_come_from_the_counters_of_the_runs_disk(tmp_path, monkeypatch):
    counters = iter([(0, 0), (3_000_000, 500_000), (3_000_000, 500_000)])
    times = iter([10.0, 12.0, 13.0])

    def disk_io_counters(perdisk):
        read, write = next(counters)
        counter = types.SimpleNamespace
        return {"sdz": counter(read_bytes=read, write_bytes=write), "sdy": counter(read_bytes=9e9, write_bytes=9e9)}

    monkeypatch.setattr(host, "disk_name", lambda folder: "sdz")
    monkeypatch.setattr(psutil, "disk_io_counters", disk_io_counters)
    monkeypatch.setattr(host, "time", types.SimpleNamespace(monotonic=lambda: next(times)))  # the threads of others keep the clock
    reader = HostReader(tmp_path)
    readings = [reader.read() for _ in range(3)]
    assert readings[0]["disk_read_bytes_per_s"] is None  # nothing to compare with yet
    assert (readings[1]["disk_read_bytes_per_s"], readings[1]["disk_write_bytes_per_s"]) == (1_500_000, 250_000)
    assert readings[2]["disk_read_bytes_per_s"] == 0


def test_an_uncounted_disk_and_a_refusing_system_give_none(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "disk_name", lambda folder: None)
    assert HostReader(tmp_path).read()["disk_read_bytes_per_s"] is None
    monkeypatch.setattr(psutil, "disk_io_counters", lambda perdisk: None)
    assert HostReader(tmp_path).read()["disk_write_bytes_per_s"] is None


def test_the_disk_of_a_folder_is_found_or_unknown(tmp_path):
    name = host.disk_name(tmp_path)
    assert name is None or "/" not in name
    assert host.disk_name(tmp_path / "nothing") is None


def test_a_process_that_is_gone_has_no_memory(tmp_path, monkeypatch):
    reader = HostReader(tmp_path)

    def gone():
        raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(reader._process, "memory_info", gone)
    assert reader.read()["worker_ram_bytes"] is None


def test_the_kernels_count_of_killed_processes_is_a_number_or_unknown():
    kills = host.oom_kills()
    assert kills is None or kills >= 0


@pytest.mark.skipif(not os.path.exists("/proc/vmstat"), reason="Linux only")
def test_the_count_is_read_from_the_kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "Path", lambda name: tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text("pgfault 3\noom_kill 7\n", "utf-8")
    assert host.oom_kills() == 7
    (tmp_path / "vmstat").write_text("pgfault 3\n", "utf-8")
    assert host.oom_kills() is None
    (tmp_path / "vmstat").unlink()
    assert host.oom_kills() is None
