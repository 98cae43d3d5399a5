"""How a run ended, in words: what happened, what to do, and the button that does it. Loads no torch.

An error that was caught explains itself by its type; a process that vanished is explained from what it left behind:
exit code, last lines of its log, memory readings, free disk. An end that is not understood is said to be so.
"""

import errno
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatrain import errors
from megatrain.units import MIB, format_bytes

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
RAM_FULL_SHARE = 0.92  # at the last reading, up to a second before the end
DISK_FULL_BYTES = 64 * MIB
EXIT_LOCKED = 4  # the worker found its run locked by another one
START_MARK = "==== "  # begins the line that every start of a worker writes to its log


@dataclass(frozen=True)
class Explanation:
    """One failure card of the page. `action` names what a button offers; empty when there is nothing to press.

    Actions: resume, start, lower_vram, lower_ram, free_space, halve_learning_rate, open_model_page, choose_model,
    choose_data, choose_checkpoint, change_plan, change_settings, install_torch, show_running, restart_computer, delete.
    """

    title: str
    text: str
    hint: str = ""
    action: str = ""


@dataclass(frozen=True)
class Vanished:
    """What is left of a worker that ended without a word."""

    exit_code: int | None  # negative: the signal; None: nobody was there to see it
    log_tail: str
    step: int = 0
    phase: str = ""  # what it was doing: download, tokenise, load, train, save, ...
    ram_share: float | None = None  # memory in use at the last reading
    system_killed: bool | None = None  # the kernel has ended a process for lack of memory since the start
    free_disk_bytes: int | None = None
    checkpoint_step: int | None = None  # newest complete one


# ---- caught errors ---------------------------------------------------------------------------------------------------
def explain_error(error: BaseException, step: int = 0, checkpoint_step: int | None = None) -> Explanation:
    """Why a run failed, from the exception that ended it at `step`."""
    message = mask(str(getattr(error, "message", "")) or " ".join(str(error).split())) or type(error).__name__
    hint = mask(getattr(error, "hint", ""))
    if isinstance(error, errors.NonFiniteError):
        return _non_finite(message, checkpoint_step)
    if isinstance(error, errors.OutOfVramError) or type(error).__name__ == "OutOfMemoryError":
        return _out_of_vram(message, step)
    if isinstance(error, errors.DiskFullError) or (isinstance(error, OSError) and error.errno in NO_SPACE):
        return _disk_full(message, checkpoint_step)
    if isinstance(error, MemoryError):
        return _out_of_ram(message, checkpoint_step)
    for kind, title, action in _BY_TYPE:
        if isinstance(error, kind):
            page = " asks for permission" in message
            return Explanation(title, message, hint, "open_model_page" if page else action)
    known = _from_text(f"{type(error).__name__}: {message}", step, checkpoint_step)
    if known is not None:
        return known
    hint = f"The log holds the details. {_again(checkpoint_step)}"
    return Explanation("Training ended with an error", f"{type(error).__name__}: {message}"[:1000], hint, _go_on(checkpoint_step))


def explain_pause(message: str) -> Explanation:
    """Why a run waits that has nothing left to do but to write its last checkpoint, from the failure of that."""
    title = "Disk is full; training is paused, nothing is lost"
    return Explanation(title, mask(message), "Free space, then continue: saving is tried again.", "free_space")


_BY_TYPE: tuple[tuple[type[BaseException], str, str], ...] = (
    (errors.UnsupportedModelError, "This model is not supported", "choose_model"),
    (errors.ModelError, "The model cannot be used", "choose_model"),
    (errors.DataError, "The data cannot be used", "choose_data"),
    (errors.PlanError, "It does not fit", "change_plan"),
    (errors.ConfigError, "The settings cannot be used", "change_settings"),
    (errors.CheckpointError, "The checkpoint cannot be used", "choose_checkpoint"),
    (errors.RunError, "The run cannot go on", "resume"),
)


# ---- vanished processes ----------------------------------------------------------------------------------------------
def explain_vanished(end: Vanished) -> Explanation:
    """Why a worker is gone, from what it left."""
    last_lines = "\n".join(_of_last_start(end.log_tail)[-40:])
    again, action = _again(end.checkpoint_step), _go_on(end.checkpoint_step)
    if end.exit_code == EXIT_LOCKED:
        text = "Another process trains this run and did not let go of it."
        return Explanation("Already running", text, "Watch that one.", "show_running")
    killed = end.exit_code is None or end.exit_code == -9
    if killed and (end.system_killed or (end.ram_share or 0.0) >= RAM_FULL_SHARE):
        share = f" Memory was {end.ram_share:.0%} full at the last reading." if end.ram_share else ""
        text = f"It was ended {_where(end)}.{share}"
        return Explanation("The system stopped the run: RAM was full", text, f"Lower the RAM limit. {again}", "lower_ram")
    if end.free_disk_bytes is not None and end.free_disk_bytes < DISK_FULL_BYTES:
        return _disk_full(f"The disk of the run has {format_bytes(end.free_disk_bytes)} free", end.checkpoint_step)
    if end.exit_code == -9:
        text = f"Something ended the process {_where(end)} with signal 9 (kill); memory was not short."
        return Explanation("The run was killed from outside", text, again, action)
    if end.exit_code == -15:
        return Explanation("The run was ended from outside", f"It was told to end {_where(end)} and did not get to save.", again, action)
    known = _from_text(last_lines, end.step, end.checkpoint_step)
    if known is not None:
        return known
    name = _signal_name(end.exit_code)
    if name:
        text = f"The process crashed {_where(end)} in native code ({name}): PyTorch, a driver, or faulty memory.{_quoted(last_lines)}"
        return Explanation("The process crashed", text, f"{again} If it comes again, update the driver.", action)
    if end.exit_code:
        text = f"It ended {_where(end)} with exit code {end.exit_code}. The reason is not known.{_quoted(last_lines)}"
        return Explanation("The run ended for an unknown reason", text, again, action)
    text = f"It ended {_where(end)} without a word (power, restart, or killed from outside).{_quoted(last_lines)}"
    return Explanation("The process vanished", text, again, action)


def _of_last_start(tail: str) -> list[str]:
    lines = tail.splitlines()
    marks = [number for number, line in enumerate(lines) if line.startswith(START_MARK)]
    return lines[marks[-1] + 1 :] if marks else lines


def _where(end: Vanished) -> str:
    doing = {"download": "while downloading", "tokenise": "while preparing the data", "load": "while loading the model",
             "save": "while saving"}.get(end.phase)  # fmt: skip
    return doing or (f"after step {end.step}" if end.step else "before the first step")


def _quoted(lines: str) -> str:
    shown = [line for line in mask(lines).splitlines() if line.strip()][-8:]
    return "\nLast lines of the log:\n" + "\n".join(line[:300] for line in shown) if shown else ""


def _signal_name(code: int | None) -> str:
    if code is None:
        return ""
    if code in (0xC0000005, 0xC0000005 - (1 << 32)):  # Windows gives the exception as exit code
        return "access violation"
    names = {"SIGSEGV": "segmentation fault", "SIGABRT": "abort", "SIGBUS": "bus error", "SIGILL": "illegal instruction",
             "SIGFPE": "arithmetic error"}  # fmt: skip
    return next((text for name, text in names.items() if code == -getattr(signal, name, 0)), "")


def _again(checkpoint_step: int | None) -> str:
    return "Start it again from the beginning." if checkpoint_step is None else f"Resume goes on from step {checkpoint_step}."


def _go_on(checkpoint_step: int | None) -> str:
    return "start" if checkpoint_step is None else "resume"


# ---- known causes ----------------------------------------------------------------------------------------------------
def _out_of_vram(message: str, step: int) -> Explanation:
    wanted = re.search(r"[Tt]ried to allocate ([\d.]+ ?[KMG]iB)", message)
    missing = f" It wanted {wanted[1]} more." if wanted else f" {message[:300]}"
    where = f"at step {step + 1}" if step else "before the first step was done"
    return Explanation("The graphics card ran out of memory", f"That was {where}.{missing}", "Close other programs that use the card, or "
                       "lower the VRAM limit and resume.", "lower_vram")  # fmt: skip


def _out_of_ram(message: str, checkpoint_step: int | None) -> Explanation:
    text = f"The system gave no more memory. {message[:300]}"
    return Explanation("RAM is full", text, f"Lower the RAM limit. {_again(checkpoint_step)}", "lower_ram")


def _pinned(message: str, checkpoint_step: int | None) -> Explanation:
    text = f"The system refused to pin memory for the graphics card; the card itself is not full. {message[:300]}"
    return Explanation("Pinned memory was refused", text, f"Lower the RAM limit. {_again(checkpoint_step)}", "lower_ram")


def _disk_full(message: str, checkpoint_step: int | None) -> Explanation:
    return Explanation("The disk is full", f"{message.rstrip('.')}.", f"Free space. {_again(checkpoint_step)}", "free_space")


def _non_finite(message: str, checkpoint_step: int | None) -> Explanation:
    good = "No checkpoint was written before." if checkpoint_step is None else f"Checkpoint {checkpoint_step} is good."
    hint = "Half the learning rate usually helps; so do a longer warm-up and a look at the data of that step."
    return Explanation("The loss is no number any more", f"{message} {good}", hint, "halve_learning_rate")


def _lost_gpu(message: str, checkpoint_step: int | None) -> Explanation:
    text = f"The graphics card or its driver stopped answering. {message[:300]}"
    return Explanation("The driver lost the graphics card", text, f"Restart the computer. {_again(checkpoint_step)}", "restart_computer")


def _no_gpu_in_torch(message: str, checkpoint_step: int | None) -> Explanation:
    hint = "`python -m megatrain doctor` prints the install command for this machine."
    return Explanation("PyTorch cannot use the graphics card", message[:300], hint, "install_torch")


def _permission(message: str, checkpoint_step: int | None) -> Explanation:
    hint = "Open its page on the hub, accept the conditions, then log in with `hf auth login`."
    return Explanation("This model asks for permission first", message[:300], hint, "open_model_page")


def _not_on_hub(message: str, checkpoint_step: int | None) -> Explanation:
    hint = "Check the name; for a private one log in with `hf auth login`."
    return Explanation("Not found on the hub", message[:300], hint, "choose_model")


def _offline(message: str, checkpoint_step: int | None) -> Explanation:
    return Explanation("The hub cannot be reached", message[:300], "Check the connection and start again, or choose a folder.", "start")


def _missing_package(message: str, checkpoint_step: int | None) -> Explanation:
    hint = "Run `pip install -r requirements.txt` in the environment of MegaTrain."
    return Explanation("A package is missing", message[:300], hint, "start")


_Cause = Callable[[str, int | None], Explanation]
# The first that matches counts; the line that it stands in becomes the text.
_KNOWN: tuple[tuple[str, _Cause], ...] = (
    (r"pinned memory|cudaHostRegister|cudaHostAlloc|CUDA error: OS call failed|resource already mapped", _pinned),
    (r"not compiled with CUDA enabled|Found no NVIDIA driver|driver on your system is too old|no kernel image is available",
     _no_gpu_in_torch),
    (r"\bXid\b|fallen off the bus|GPU is lost|GpuIsLost|unspecified launch failure|CUDA error: unknown error|device.{0,20}unavailable"
     r"|illegal memory access|uncorrectable ECC|launch timed out", _lost_gpu),
    (r"DefaultCPUAllocator|[Cc]annot allocate memory|\bMemoryError\b|std::bad_alloc", _out_of_ram),
    (r"No space left on device|[Dd]isk quota exceeded|database or disk is full", _disk_full),
    (r"GatedRepoError|\b(401|403) Client Error|\b(401|403) (Unauthorized|Forbidden)", _permission),
    (r"RepositoryNotFoundError|RevisionNotFoundError|\b404 Client Error", _not_on_hub),
    (r"ConnectError|ConnectionError|OfflineModeIsEnabled|LocalEntryNotFoundError|Name or service not known|ConnectTimeout|ReadTimeout",
     _offline),
    (r"ModuleNotFoundError", _missing_package),
)  # fmt: skip


def _from_text(text: str, step: int, checkpoint_step: int | None) -> Explanation | None:
    if re.search(r"CUDA out of memory|CUDA error: out of memory", text) and not re.search("pinned|cudaHost", text):
        return _out_of_vram(_line_with(text, "out of memory"), step)
    for pattern, cause in _KNOWN:
        if re.search(pattern, text):
            return cause(_line_with(text, pattern), checkpoint_step)
    return None


def _line_with(text: str, pattern: str) -> str:
    return mask(next((line.strip() for line in reversed(text.splitlines()) if re.search(pattern, line)), ""))


def mask(text: str) -> str:
    """The text without hub tokens, passwords in addresses and the name of the home folder."""
    text = re.sub(r"\bhf_[A-Za-z0-9]{6,}", "hf_***", text)
    text = re.sub(r"(?i)(bearer\s+)[\w.~+/=-]{8,}", r"\1***", text)
    text = re.sub(r"(\w+://)[^/\s:@]+:[^/\s@]+@", r"\1***@", text)
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text
