"""Checks of the computer, each with a machine where it must complain and one where it must not."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain import doctor, probe
from megatrain.doctor import Finding, Level
from megatrain.hardware import GpuProcess, read_machine
from megatrain.units import GIB
from tests.shapes import machine


def with_torch(monkeypatch: pytest.MonkeyPatch, answer: tuple[str, str | None, bool, int] | str, version: str | None = "2.13.0") -> None:
    monkeypatch.setattr(doctor, "_ask_torch", lambda: answer)
    monkeypatch.setattr(doctor, "torch_version", lambda: version)


def test_every_check_answers_on_this_computer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with_torch(monkeypatch, ("2.13.0", None, False, 0))
    findings = doctor.examine(machine(0, 64), tmp_path)
    assert [finding.check for finding in findings] == [
        "Python", "Packages", "PyTorch", "NVIDIA driver", "VRAM", "RAM", "Disk", "Workspace", "Pinned memory", "Bus", "Compiler", "Speed",
    ]  # fmt: skip
    assert all(finding.level is Level.OK for finding in findings), findings
    assert all(finding.found and finding.wanted for finding in findings)


def test_torch_is_asked_in_a_process_of_its_own():
    version, cuda, available, count = doctor._ask_torch()
    import torch

    assert version == torch.__version__
    assert (cuda, available, count) == (torch.version.cuda, torch.cuda.is_available(), torch.cuda.device_count())


def test_a_torch_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "ASK_TORCH", "raise OSError('libcudart.so.13: cannot open shared object file')")
    finding = doctor.check_torch(machine(24), Path())
    assert finding.level is Level.ERROR
    assert "libcudart.so.13" in finding.found


# ---- torch and driver ------------------------------------------------------------------------------------------------
def test_a_card_and_a_cpu_build_give_the_exact_command(monkeypatch: pytest.MonkeyPatch):
    with_torch(monkeypatch, ("2.13.0+cpu", None, False, 0))
    finding = doctor.check_torch(machine(24), Path())
    assert finding.level is Level.ERROR
    assert "CPU only" in finding.found
    assert finding.fix == f'"{sys.executable}" -m pip install --force-reinstall torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130'


@pytest.mark.parametrize(("driver", "capability", "build"), [
    ("580.65.06", (8, 9), "cu130"), ("560.1", (8, 9), "cu126"), (None, (9, 0), "cu130"), ("590.1", (7, 0), "cu126"),
    ("580.1", None, "cu130"),
])  # fmt: skip
def test_the_command_fits_driver_and_card(driver: str | None, capability: tuple[int, int] | None, build: str):
    computer = machine(24)
    card = dataclasses.replace(computer.gpus[0], compute_capability=capability)
    assert doctor.torch_command(dataclasses.replace(computer, gpus=(card,), driver_version=driver)).endswith(f"whl/{build}")


def test_without_a_card_a_cpu_build_is_right(monkeypatch: pytest.MonkeyPatch):
    with_torch(monkeypatch, ("2.13.0+cpu", None, False, 0))
    assert doctor.check_torch(machine(0), Path()).level is Level.OK
    with_torch(monkeypatch, "", version=None)
    finding = doctor.check_torch(machine(0), Path())
    assert finding.level is Level.ERROR
    assert finding.fix.endswith("whl/cpu")


def test_a_card_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch):
    with_torch(monkeypatch, ("2.13.0+cu130", "13.0", False, 0))
    finding = doctor.check_torch(machine(24), Path())
    assert finding.level is Level.ERROR
    assert "driver" in finding.fix
    with_torch(monkeypatch, ("2.13.0+cu130", "13.0", True, 1))
    assert doctor.check_torch(machine(24), Path()).level is Level.OK


def test_the_pinned_version_is_that_of_the_requirements():
    lines = (Path(doctor.__file__).parent.parent / "requirements.txt").read_text("utf-8").splitlines()
    wanted = {line.split("#")[0].strip() for line in lines}
    assert f"torch=={doctor.TORCH_PIN}" in wanted
    for name, oldest in doctor.OLDEST_PACKAGES.items():
        assert any(line.startswith(f"{name}>={oldest}") for line in wanted), name


def test_drivers(monkeypatch: pytest.MonkeyPatch):
    old = dataclasses.replace(machine(24), driver_version="470.82")
    assert doctor.check_driver(old, Path()).level is Level.ERROR
    assert doctor.check_driver(machine(24), Path()) == Finding("NVIDIA driver", Level.OK, "580.65", "525 or newer, with an NVIDIA card")
    broken = dataclasses.replace(machine(0), notes=("The NVIDIA driver does not answer: Unknown Error.",))
    assert doctor.check_driver(broken, Path()).level is Level.WARNING
    unreadable = dataclasses.replace(machine(24), driver_version=None)
    assert doctor.check_driver(unreadable, Path()).level is Level.OK


# ---- room ------------------------------------------------------------------------------------------------------------
def test_who_holds_the_vram_is_named():
    computer = machine(24)
    holders = (GpuProcess(1, "chrome", int(1.1 * GIB)), GpuProcess(2, "game", None))
    crowded = dataclasses.replace(computer.gpus[0], free_bytes=18 * GIB, processes=holders)
    finding = doctor.check_vram(dataclasses.replace(computer, gpus=(crowded,)), Path())
    assert finding.level is Level.WARNING
    assert "18.0 GiB of 24.0 GiB free; held by chrome 1.10 GiB, game" in finding.found
    assert doctor.check_vram(computer, Path()).level is Level.OK


def test_little_ram_and_disk_are_warned_of(tmp_path: Path):
    small = dataclasses.replace(machine(0, 4), disk_free_bytes=GIB)
    assert doctor.check_ram(small, tmp_path).level is Level.WARNING
    assert doctor.check_disk(small, tmp_path).level is Level.WARNING
    assert doctor.check_ram(machine(0, 64), tmp_path).level is Level.OK
    assert doctor.check_disk(machine(0, 64), tmp_path).level is Level.OK


def test_a_workspace_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert doctor.check_workspace(machine(), tmp_path / "new").level is Level.OK
    assert not (tmp_path / "new").exists()

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    finding = doctor.check_workspace(machine(), tmp_path)
    assert finding.level is Level.ERROR
    assert "Permission denied" in finding.found
    assert "--workspace" in finding.fix


def test_pinned_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "is_wsl", lambda: False)
    monkeypatch.setattr(doctor, "_locked_memory_limit", lambda: None)
    assert "57.6 GiB" in doctor.check_pinned(machine(24, 64), Path()).found
    monkeypatch.setattr(doctor, "_locked_memory_limit", lambda: 8 * GIB)
    limited = doctor.check_pinned(machine(24, 64), Path())
    assert "8.00 GiB" in limited.found
    assert "ulimit" in limited.fix
    monkeypatch.setattr(doctor, "is_wsl", lambda: True)
    assert doctor.check_pinned(machine(24, 64), Path()).level is Level.WARNING
    assert doctor.check_pinned(machine(0, 64), Path()).level is Level.OK


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limit")
def test_the_limit_of_the_shell_is_read():
    limit = doctor._locked_memory_limit()
    assert limit is None or limit >= 0


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch):
    versions = {"transformers": "5.17.0", "datasets": "5.10.1", "safetensors": "0.8.0rc1", "gradio": "6.7.2"}

    def version(name: str) -> str:
        if name not in versions:
            raise doctor.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor.metadata, "version", version)
    finding = doctor.check_packages(machine(), Path())
    assert finding.level is Level.ERROR
    assert finding.found == "gradio 6.7.2 is older than 6.31; plotly is missing"
    assert "requirements.txt" in finding.fix
    monkeypatch.setattr(doctor, "OLDEST_PACKAGES", {"transformers": "5.17"})
    assert doctor.check_packages(machine(), Path()).level is Level.OK


def test_an_old_python(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "OLDEST_PYTHON", (99, 0))
    assert doctor.check_python(machine(), Path()).level is Level.ERROR


def test_a_card_on_fewer_lanes_than_it_has_is_warned_of():
    computer = machine(24)
    card = dataclasses.replace(computer.gpus[0], pcie_generation=4, pcie_width=16, pcie_width_now=4)
    finding = doctor.check_link(dataclasses.replace(computer, gpus=(card,)), Path())
    assert finding.level is Level.WARNING
    assert "4 of 16 lanes" in finding.found
    full = dataclasses.replace(card, pcie_width_now=16)
    assert doctor.check_link(dataclasses.replace(computer, gpus=(full,)), Path()).level is Level.OK
    assert doctor.check_link(computer, Path()).level is Level.OK
    assert doctor.check_link(machine(), Path()).level is Level.OK


def test_a_card_without_a_compiler_is_told():
    assert doctor.check_compiler(machine(24), Path()).level is Level.OK
    finding = doctor.check_compiler(dataclasses.replace(machine(24), can_compile=False), Path())
    assert finding.level is Level.WARNING
    assert "gcc" in finding.fix
    assert doctor.check_compiler(dataclasses.replace(machine(0), can_compile=False), Path()).level is Level.OK


def test_speed_says_whether_it_was_measured():
    computer = machine(24)
    finding = doctor.check_speed(computer, Path())
    assert "TFLOP/s" in finding.found
    assert "(estimated)" in finding.found
    assert "--measure" in finding.fix
    card = dataclasses.replace(computer.gpus[0], rates=dataclasses.replace(computer.gpus[0].rates, measured=True))
    finding = doctor.check_speed(dataclasses.replace(computer, gpus=(card,)), Path())
    assert "(measured)" in finding.found
    assert not finding.fix
    assert "GFLOP/s" in doctor.check_speed(machine(), Path()).found


def test_speed_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """The only test that measures; what it finds is not judged. In this process, which may have loaded torch already."""

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-P", "-m", "megatrain.probe"]
        code = probe.main(command[4:])
        return subprocess.CompletedProcess(command, code, capsys.readouterr().out, "")

    monkeypatch.setattr(probe, "_SECONDS", 0.0)
    monkeypatch.setattr(doctor.subprocess, "run", run)
    before = read_machine(tmp_path).cpu_rates
    assert not before.measured
    assert doctor.measure(tmp_path) == ""
    rates = read_machine(tmp_path).cpu_rates
    assert rates.measured
    assert set(rates.compute_flops_per_s) == set(before.compute_flops_per_s)
    values = [value for value in dataclasses.asdict(rates).values() if isinstance(value, float)]
    assert all(0 < value < 1e15 for value in [*values, *rates.compute_flops_per_s.values()])
    assert list((tmp_path / "offload").iterdir()) == []


def test_a_measurement_that_fails_in_its_process_says_why(tmp_path: Path):
    (tmp_path / "offload").write_text("a file where the folder should be")
    assert "offload" in doctor.measure(tmp_path)
