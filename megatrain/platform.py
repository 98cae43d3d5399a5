"""What differs between Linux, WSL, macOS and Windows, behind one seam; everything else in the product is the same code.

Each function works everywhere and degrades where the system refuses: no file locks (some network drives), no direct
I/O (tmpfs), files that cannot be replaced while open (Windows), memory that cannot be pinned (Windows, WSL). Tests
simulate the refusals by replacing the small `_system_*` functions at the end of this file.
"""

import contextlib
import errno
import importlib.util
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

WINDOWS = os.name == "nt"
DIRECT_ALIGNMENT = 4096  # bytes; offsets, lengths and addresses of direct I/O are multiples of this on every drive seen


def can_compile() -> bool:
    """Whether PyTorch can compile kernels for a GPU here: it needs Triton, which needs a C compiler for what launches them."""
    compilers = [name for name in (os.environ.get("CC"), "clang", "gcc") if name]
    return importlib.util.find_spec("triton") is not None and any(map(shutil.which, compilers))


# Processes: identity, detached start, end ---------------------------------------------------------------------------


def process_identity(pid: int) -> str | None:
    """A text that no other process has, also not a later one with the same pid; None when no such process runs.

    Linux: start time in clock ticks since boot, which no clock change moves (WSL's clock jumps after sleep).
    Elsewhere psutil's creation time. A zombie does not run.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        stat = Path(f"/proc/{pid}/stat")
        if not WINDOWS and stat.exists():
            boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8")[:8]
            return f"boot {boot} ticks {stat.read_text('utf-8', 'replace').rpartition(')')[2].split()[19]}"
        return f"time {process.create_time():.2f}"
    except (psutil.Error, OSError, ValueError, IndexError):
        return None


def start_detached(arguments: list[str], log: Path, environment: dict[str, str] | None = None,
                   ended: Callable[[int], None] | None = None) -> int:  # fmt: skip
    """Starts a process that outlives this one, in a group of its own, its output appended to `log`; returns its pid.

    No shell and no terminal: arguments stay a list, standard input is empty. `ended(exit_code)` is called from a
    thread when the process ends while this one still runs (negative: the signal, as in subprocess).
    """
    with log.open("ab") as output:
        process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   env=environment, close_fds=True, **_system_detached())  # fmt: skip
    pid = process.pid

    def reap() -> None:
        code = process.wait()
        if ended is not None:
            ended(code)

    threading.Thread(target=reap, name=f"reap {pid}", daemon=True).start()
    return pid


def stop_child(process: subprocess.Popen[str]) -> None:
    """Ends a helper process of ours and closes what leads to it."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def kill_group(pid: int, identity: str) -> bool:
    """Ends a process and everything it started, at once; True when it was there. Never touches a reused pid or itself."""
    if pid == os.getpid() or process_identity(pid) != identity:
        return False
    try:
        tree = psutil.Process(pid).children(recursive=True)
        if not WINDOWS and os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            psutil.Process(pid).kill()
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False
    for child in tree:  # those that left the group
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    return True


# Files: exclusive lock, replacing, positioned and direct reads --------------------------------------------------------


@dataclass(frozen=True)
class Holder:
    """Who holds a lock."""

    pid: int
    identity: str
    host: str
    started_s: float  # Unix time

    def is_here(self) -> bool:
        """True when its process can be looked up on this machine."""
        return self.host == socket.gethostname()


class LockHeldError(OSError):
    """Another process holds the lock."""


class FileLock:
    """An exclusive lock on a file that ends with the process, however it ends. The file says who holds it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.supported = True  # False: this file system has no locks; the record in the file is all there is
        self._descriptor: int | None = None

    def acquire(self, timeout_s: float = 0.0) -> "FileLock":
        """Takes the lock and writes the holder into the file. LockHeldError when it stays held for `timeout_s`."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        give_up = time.monotonic() + max(timeout_s, 0.2)  # without open-file locks a reader's look holds it for an instant
        while True:
            try:
                _system_lock(descriptor)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                    self._take_without_locks(descriptor)
                    break
                if time.monotonic() > give_up:
                    os.close(descriptor)
                    raise LockHeldError(errno.EAGAIN, "another process holds this lock", str(self.path)) from None
                time.sleep(0.02)
        self._descriptor = descriptor
        pid = os.getpid()
        record = Holder(pid, process_identity(pid) or "", socket.gethostname(), time.time())
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, json.dumps(asdict(record)).encode())
        return self

    def _take_without_locks(self, descriptor: int) -> None:
        """The record is all there is: a process that it names and that lives is believed to hold the lock."""
        self.supported = False
        holder = _read_holder(self.path)
        if holder is not None and holder.is_here() and holder.pid != os.getpid() and process_identity(holder.pid) == holder.identity:
            os.close(descriptor)
            raise LockHeldError(errno.EAGAIN, "another process holds this lock", str(self.path))

    def release(self) -> None:
        """Gives the lock back; the file stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()


def look_at_lock(path: Path) -> tuple[bool | None, Holder | None]:
    """(held, last holder) without disturbing the holder. held is None where the file system has no locks."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False, None
    except OSError:  # a read-only copy: nobody can hold it from there
        return None, _read_holder(path)
    try:
        return _system_is_locked(descriptor), _read_holder(path)
    except OSError:
        return None, _read_holder(path)
    finally:
        os.close(descriptor)


def _read_holder(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def replace_file(source: Path, target: Path, patience_s: float = 2.0) -> None:
    """Renames over `target`, also when a reader has it open for a moment (Windows refuses then); flushes the folder."""
    give_up = time.monotonic() + patience_s
    while True:
        try:
            _system_replace(source, target)
            break
        except PermissionError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)
    flush_folder(target.parent)


def flush_folder(folder: Path) -> None:
    """Makes renames in `folder` survive a power cut. Windows has no such call; its journal does it."""
    if WINDOWS:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_at(descriptor: int, buffer: Any, offset: int) -> None:
    """Fills the whole writable `buffer` from `offset`. EOFError when the file ends before. Safe from many threads."""
    view = memoryview(buffer).cast("B")
    while len(view):
        count = _system_read_at(descriptor, view, offset)
        if count == 0:
            raise EOFError(f"the file ends at byte {offset}, {len(view)} bytes too early")
        view, offset = view[count:], offset + count


def write_at(descriptor: int, buffer: Any, offset: int) -> None:
    """Writes the whole `buffer` at `offset`. Safe from many threads; a full disk raises OSError ENOSPC."""
    view = memoryview(buffer).cast("B")
    while len(view):
        count = _system_write_at(descriptor, view, offset)
        view, offset = view[count:], offset + count


def open_direct(path: Path, flags: int = os.O_RDONLY) -> tuple[int, bool]:
    """(descriptor, direct): opened past the page cache where the file system allows it, else as an ordinary file.

    A direct descriptor wants offsets, lengths and addresses that are multiples of DIRECT_ALIGNMENT.
    """
    flags |= getattr(os, "O_BINARY", 0)
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            return _system_open(path, flags | direct), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return _system_open(path, flags), False


def open_scratch(folder: Path, num_bytes: int) -> tuple[int, bool]:
    """(descriptor, direct) of a new file of this size in `folder` that has no name.

    The system frees it when this process ends, however it ends, so nothing is ever left behind. All of its space is taken
    now where the system can do that: OSError ENOSPC here, not in the middle of a run.
    """
    path = folder / f".megatrain-{os.getpid()}-{os.urandom(6).hex()}.states"
    created = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_TEMPORARY", 0)
    descriptor, direct = _system_open(path, created), False
    if not WINDOWS:  # there O_TEMPORARY removes it when it is closed
        plain = descriptor
        try:
            descriptor, direct = open_direct(path, os.O_RDWR)  # not at once: some systems create the file and then refuse
        finally:
            path.unlink()
            os.close(plain)
    try:
        _system_allocate(descriptor, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, direct


# Memory ---------------------------------------------------------------------------------------------------------------


def pinned_limit_bytes(ram_total_bytes: int) -> int:
    """Memory that may be pinned. Windows refuses near half of RAM; Linux takes nearly all, but the rest must breathe."""
    return int(ram_total_bytes * (0.45 if WINDOWS or is_wsl() else 0.9))


def is_wsl() -> bool:
    """True inside the Windows Subsystem for Linux."""
    try:
        return "microsoft" in Path("/proc/sys/kernel/osrelease").read_text("utf-8").lower()
    except OSError:
        return False


# The calls that differ; tests replace these to simulate refusals ------------------------------------------------------


def _system_detached() -> dict[str, Any]:
    if WINDOWS:
        return {"creationflags": 0x00000008 | 0x00000200}  # DETACHED_PROCESS | CREATE_NEW_PROCESS_GROUP
    return {"start_new_session": True}


def _system_replace(source: Path, target: Path) -> None:
    os.replace(source, target)


def _system_open(path: Path, flags: int) -> int:
    return os.open(path, flags, 0o644)


if WINDOWS:
    import msvcrt

    _LOCK_OFFSET = 1 << 30  # locked bytes cannot be read by others there, so a byte far behind the record is locked
    _seek_guard = threading.Lock()

    def _system_lock(descriptor: int) -> None:
        os.lseek(descriptor, _LOCK_OFFSET, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]

    def _system_is_locked(descriptor: int) -> bool:
        try:
            _system_lock(descriptor)
        except PermissionError:
            return True
        os.lseek(descriptor, _LOCK_OFFSET, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined]
        return False

    def _system_read_at(descriptor: int, view: memoryview, offset: int) -> int:
        with _seek_guard:
            os.lseek(descriptor, offset, os.SEEK_SET)
            data = os.read(descriptor, len(view))
        view[: len(data)] = data
        return len(data)

    def _system_write_at(descriptor: int, view: memoryview, offset: int) -> int:
        with _seek_guard:
            os.lseek(descriptor, offset, os.SEEK_SET)
            return os.write(descriptor, view)

else:
    import fcntl

    _OPEN_FILE_LOCKS = hasattr(fcntl, "F_OFD_SETLK")  # Linux: they can be looked at without being taken

    def _whole_file(kind: int) -> bytes:
        """struct flock: kind, from the start, offset 0, to the end, no pid."""
        return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)

    def _system_lock(descriptor: int) -> None:
        if _OPEN_FILE_LOCKS:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _system_is_locked(descriptor: int) -> bool:
        if _OPEN_FILE_LOCKS:
            answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_WRLCK))
            return struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False  # closing the descriptor gives it back

    def _system_read_at(descriptor: int, view: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [view], offset)

    def _system_write_at(descriptor: int, view: memoryview, offset: int) -> int:
        return os.pwrite(descriptor, view, offset)


def _system_allocate(descriptor: int, num_bytes: int) -> None:
    if num_bytes and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    else:
        os.truncate(descriptor, num_bytes)
