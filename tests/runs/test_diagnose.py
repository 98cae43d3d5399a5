"""Every known end has its words and its button; an unknown one says so; secrets stay secret."""

import errno
from pathlib import Path

import pytest

from megatrain import errors
from megatrain.runs.diagnose import START_MARK, Vanished, explain_error, explain_vanished, mask


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


class GatedRepoError(OSError):
    """Named as the hub's."""


@pytest.mark.parametrize(("error", "title", "action"), [
    (errors.OutOfVramError("CUDA out of memory. Tried to allocate 1.90 GiB"), "The graphics card ran out of memory", "lower_vram"),
    (OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 ..."), "The graphics card ran out of memory", "lower_vram"),
    (RuntimeError("CUDA error: out of memory"), "The graphics card ran out of memory", "lower_vram"),
    (RuntimeError("CUDA error: out of memory in cudaHostRegister"), "Pinned memory was refused", "lower_ram"),
    (MemoryError(), "RAM is full", "lower_ram"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."), "RAM is full", "lower_ram"),
    (errors.NonFiniteError("Loss became NaN at step 840."), "The loss is no number any more", "halve_learning_rate"),
    (errors.DiskFullError("No space for checkpoint 5"), "The disk is full", "free_space"),
    (OSError(errno.ENOSPC, "No space left on device"), "The disk is full", "free_space"),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), "The disk is full", "free_space"),
    (errors.ModelError("The model x/y asks for permission first.", "Open it."), "The model cannot be used", "open_model_page"),
    (GatedRepoError("403 Client Error"), "This model asks for permission first", "open_model_page"),
    (errors.ModelError("There is no folder"), "The model cannot be used", "choose_model"),
    (OSError("404 Client Error: Not Found for url"), "Not found on the hub", "choose_model"),
    (ConnectionError("Name or service not known"), "The hub cannot be reached", "start"),
    (RuntimeError("Torch not compiled with CUDA enabled"), "PyTorch cannot use the graphics card", "install_torch"),
    (RuntimeError("The NVIDIA driver on your system is too old"), "PyTorch cannot use the graphics card", "install_torch"),
    (RuntimeError("CUDA error: unspecified launch failure"), "The driver lost the graphics card", "restart_computer"),
    (errors.UnsupportedModelError("mamba is not understood"), "This model is not supported", "choose_model"),
    (errors.DataError("No row has a trained token."), "The data cannot be used", "choose_data"),
    (errors.PlanError("9 GiB of RAM are missing.", "Take bf16-lean."), "It does not fit", "change_plan"),
    (errors.ConfigError([("train.x", "unknown key")]), "The settings cannot be used", "change_settings"),
    (errors.CheckpointError("a.safetensors is too short"), "The checkpoint cannot be used", "choose_checkpoint"),
    (ZeroDivisionError("division by zero"), "Training ended with an error", "resume"),
])  # fmt: skip
def test_caught_errors(error, title, action):
    found = explain_error(error, step=11, checkpoint_step=10)
    assert (found.title, found.action) == (title, action)
    assert found.text


def test_the_words_carry_the_numbers_and_the_hints():
    assert "at step 12. It wanted 1.90 GiB more." in explain_error(errors.OutOfVramError("Tried to allocate 1.90 GiB"), 11).text
    assert "Checkpoint 800 is good." in explain_error(errors.NonFiniteError("NaN at step 840."), 839, 800).text
    assert explain_error(errors.PlanError("RAM", "Take bf16-lean.")).hint == "Take bf16-lean."
    assert "ZeroDivisionError: division by zero" in explain_error(ZeroDivisionError("division by zero")).text
    assert "from the beginning" in explain_error(MemoryError()).hint


@pytest.mark.parametrize(("evidence", "title"), [
    ({"exit_code": -9, "ram_share": 0.97}, "The system stopped the run: RAM was full"),
    ({"exit_code": None, "ram_share": 0.97}, "The system stopped the run: RAM was full"),
    ({"exit_code": -9, "system_killed": True}, "The system stopped the run: RAM was full"),
    ({"exit_code": -9, "ram_share": 0.3, "system_killed": False}, "The run was killed from outside"),
    ({"exit_code": -15}, "The run was ended from outside"),
    ({"exit_code": -11}, "The process crashed"),
    ({"exit_code": -7}, "The process crashed"),
    ({"exit_code": 0xC0000005}, "The process crashed"),
    ({"exit_code": 4}, "Already running"),
    ({"exit_code": 1}, "The run ended for an unknown reason"),
    ({"exit_code": None}, "The process vanished"),
    ({"exit_code": None, "free_disk_bytes": 0}, "The disk is full"),
    ({"exit_code": 1, "log_tail": "x\nOSError: [Errno 28] No space left on device\n"}, "The disk is full"),
    ({"exit_code": 1, "log_tail": "OutOfMemoryError: CUDA out of memory. Tried to ..."}, "The graphics card ran out of memory"),
    ({"exit_code": -6, "log_tail": "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."}, "The driver lost the graphics card"),
    ({"exit_code": 1, "log_tail": "ModuleNotFoundError: No module named 'torch'"}, "A package is missing"),
])  # fmt: skip
def test_vanished_processes(evidence, title):
    found = explain_vanished(Vanished(**{"log_tail": "", "step": 7, "checkpoint_step": 5, **evidence}))
    assert found.title == title
    assert found.hint


def test_an_unknown_end_quotes_the_log_and_names_the_place():
    found = explain_vanished(Vanished(exit_code=3, log_tail="one\n\ntwo\nlast line\n", step=7, checkpoint_step=None))
    assert "exit code 3" in found.text
    assert found.text.endswith("one\ntwo\nlast line")
    assert "after step 7" in found.text
    assert found.action == "start"
    assert "while downloading" in explain_vanished(Vanished(exit_code=3, log_tail="", phase="download")).text


def test_only_the_lines_since_the_last_start_count():
    tail = f"{START_MARK}first\nOSError: [Errno 28] No space left on device\n{START_MARK}second\nall is well\n"
    assert explain_vanished(Vanished(exit_code=3, log_tail=tail)).title == "The run ended for an unknown reason"


def test_secrets_and_the_home_folder_are_masked():
    text = f"hf_AbCdEf123456 at {Path.home()}/x with Bearer abcdef1234567 from https://me:secret@host/x"
    masked = mask(text)
    assert "AbCdEf" not in masked
    assert "abcdef1234567" not in masked
    assert "secret" not in masked
    assert str(Path.home()) not in masked
    assert "AbCdEf" not in explain_vanished(Vanished(exit_code=3, log_tail=text)).text
    assert "AbCdEf" not in explain_error(ValueError(text)).text
