"""The seam between systems: locks, detached starts, replacing, positioned and direct I/O, and what happens when refused."""

import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatrain import platform
from megatrain.platform import FileLock, LockHeldError, look_at_lock, process_identity

HOLD = """
import sys, time
from pathlib import Path
from megatrain.platform import FileLock
FileLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def holder_process(path: Path) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()


def wait_for(condition, seconds: float = 10.0):
    give_up = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.01)
    return value


def test_a_lock_is_exclusive_says_who_holds_it_and_ends_with_the_process(tmp_path):
    path = tmp_path / "lock"
    process = holder_process(path)
    try:
        held, holder = look_at_lock(path)
        assert held is True
        assert holder.pid == process.pid
        assert holder.is_here()
        assert holder.identity == process_identity(process.pid)
        with pytest.raises(LockHeldError):
            FileLock(path).acquire()
    finally:
        end(process)
    assert look_at_lock(path)[0] is False
    with FileLock(path).acquire():
        assert look_at_lock(path)[1].pid == os.getpid()
    assert look_at_lock(path)[0] is False


def test_locks_of_systems_without_open_file_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "_OPEN_FILE_LOCKS", False)
    with FileLock(tmp_path / "lock").acquire():
        assert look_at_lock(tmp_path / "lock")[0] is True
        with pytest.raises(LockHeldError):
            FileLock(tmp_path / "lock").acquire()
    assert look_at_lock(tmp_path / "lock")[0] is False


def test_a_lock_waits_for_the_holder_to_end(tmp_path):
    process = holder_process(tmp_path / "lock")
    process.kill()
    with FileLock(tmp_path / "lock").acquire(timeout_s=5.0) as lock:
        assert lock.supported
    end(process)


def test_looking_never_makes_an_acquire_fail(tmp_path):
    path = tmp_path / "lock"
    looker = subprocess.Popen([sys.executable, "-c", "import sys\nfrom pathlib import Path\nfrom megatrain.platform import look_at_lock\n"
                               "print('go', flush=True)\nwhile True: look_at_lock(Path(sys.argv[1]))", str(path)],
                              stdout=subprocess.PIPE, text=True)  # fmt: skip
    looker.stdout.readline()
    try:
        for _ in range(200):
            with FileLock(path).acquire():
                pass
    finally:
        end(looker)


def test_a_file_system_without_locks_falls_back_to_the_record(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(platform, "_system_lock", refuse)
    monkeypatch.setattr(platform, "_system_is_locked", refuse)
    with FileLock(tmp_path / "lock").acquire() as lock:
        assert not lock.supported
        held, holder = look_at_lock(tmp_path / "lock")
    assert held is None
    assert holder.pid == os.getpid()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        record = {"pid": other.pid, "identity": process_identity(other.pid), "host": holder.host, "started_s": 0.0}
        (tmp_path / "lock").write_text(json.dumps(record), "utf-8")
        with pytest.raises(LockHeldError):
            FileLock(tmp_path / "lock").acquire()
    finally:
        other.kill()
        other.wait()
    FileLock(tmp_path / "lock").acquire().release()


def test_a_truncated_lock_record_is_no_holder(tmp_path):
    (tmp_path / "lock").write_text('{"pid": 1, "iden', "utf-8")
    assert look_at_lock(tmp_path / "lock") == (False, None)
    assert look_at_lock(tmp_path / "nothing") == (False, None)


def test_an_identity_is_of_one_process_only():
    assert process_identity(os.getpid()) == process_identity(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert process_identity(child.pid) not in (None, process_identity(os.getpid()))
    finally:
        child.kill()
        wait_for(lambda: process_identity(child.pid) is None)  # a zombie until it is waited for
        child.wait()
    assert process_identity(2**22 + 12345) is None


def test_a_detached_process_has_a_group_of_its_own_and_reports_its_exit_code(tmp_path):
    codes = []
    log = tmp_path / "Protokoll ü.log"
    code = "import os, sys; print('out', os.getpgid(0) == os.getpid(), repr(sys.stdin.read())); sys.exit(7)"
    pid = platform.start_detached([sys.executable, "-c", code], log, ended=codes.append)
    wait_for(lambda: codes)
    assert codes == [7]
    assert log.read_text("utf-8") == "out True ''\n"
    assert process_identity(pid) is None


def test_killing_a_group_takes_the_children_and_never_a_reused_pid(tmp_path):
    code = ("import subprocess, sys, time\np = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
            "print(p.pid, flush=True)\ntime.sleep(60)")  # fmt: skip
    log = tmp_path / "log"
    codes = []
    pid = platform.start_detached([sys.executable, "-c", code], log, ended=codes.append)
    child = int(wait_for(lambda: log.read_text("utf-8").strip()))
    assert platform.kill_group(pid, "somebody else") is False
    assert process_identity(pid)
    assert platform.kill_group(pid, process_identity(pid)) is True
    wait_for(lambda: codes == [-signal.SIGKILL] and process_identity(child) is None)
    assert platform.kill_group(pid, "gone") is False
    assert platform.kill_group(os.getpid(), process_identity(os.getpid())) is False


def test_replacing_waits_for_a_reader_that_holds_the_file_open(tmp_path, monkeypatch):
    source, target = tmp_path / "new", tmp_path / "file"
    source.write_text("new", "utf-8")
    target.write_text("old", "utf-8")
    refusals = [PermissionError(errno.EACCES, "in use")] * 3

    def replace(old: Path, new: Path) -> None:
        if refusals:
            raise refusals.pop()
        os.replace(old, new)

    monkeypatch.setattr(platform, "_system_replace", replace)
    platform.replace_file(source, target)
    assert target.read_text("utf-8") == "new"
    refusals.extend([PermissionError(errno.EACCES, "in use")] * 1000)
    source.write_text("newer", "utf-8")
    with pytest.raises(PermissionError):
        platform.replace_file(source, target, patience_s=0.05)
    assert target.read_text("utf-8") == "new"


def test_positioned_reads_and_writes_are_whole_or_an_error(tmp_path, monkeypatch):
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    real_read, real_write = platform._system_read_at, platform._system_write_at
    monkeypatch.setattr(platform, "_system_read_at", lambda fd, view, at: real_read(fd, view[:3], at))  # short counts are legal
    monkeypatch.setattr(platform, "_system_write_at", lambda fd, view, at: real_write(fd, view[:2], at))
    try:
        platform.write_at(descriptor, b"0123456789", 5)
        buffer = bytearray(10)
        platform.read_at(descriptor, buffer, 5)
        assert buffer == b"0123456789"
        with pytest.raises(EOFError, match="2 bytes too early"):
            platform.read_at(descriptor, buffer, 7)
        platform.read_at(descriptor, bytearray(), 10**9)
    finally:
        os.close(descriptor)


def test_direct_io_falls_back_to_ordinary_where_it_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8192)
    real = platform._system_open

    def refuse(file: Path, flags: int) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, flags)

    descriptor, _ = platform.open_direct(path)
    buffer = mmap.mmap(-1, 4096)  # begins at a page, as direct I/O wants it
    platform.read_at(descriptor, buffer, 4096)
    assert buffer[:] == b"x" * 4096
    os.close(descriptor)
    monkeypatch.setattr(platform, "_system_open", refuse)
    descriptor, direct = platform.open_direct(path)
    os.close(descriptor)
    assert direct is False
    with pytest.raises(FileNotFoundError):
        platform.open_direct(tmp_path / "nothing")


def test_a_scratch_file_has_its_size_and_no_name(tmp_path):
    descriptor, _ = platform.open_scratch(tmp_path, 3 * 4096)
    try:
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(descriptor).st_size == 3 * 4096
        buffer = mmap.mmap(-1, 4096)
        buffer[:] = b"y" * 4096
        platform.write_at(descriptor, buffer, 8192)
        back = mmap.mmap(-1, 4096)
        platform.read_at(descriptor, back, 8192)
        assert back[:] == buffer[:]
    finally:
        os.close(descriptor)


def test_a_scratch_file_that_finds_no_room_is_refused_at_once(tmp_path, monkeypatch):
    def full(descriptor: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(platform, "_system_allocate", full)
    with pytest.raises(OSError, match="No space"):
        platform.open_scratch(tmp_path, 4096)
    assert list(tmp_path.iterdir()) == []


def test_windows_and_wsl_pin_less(monkeypatch):
    monkeypatch.setattr(platform, "is_wsl", lambda: False)
    linux = platform.pinned_limit_bytes(100)
    monkeypatch.setattr(platform, "is_wsl", lambda: True)
    assert platform.pinned_limit_bytes(100) < 50 < linux


@pytest.mark.parametrize(
    ("triton", "compiler", "able"), [(True, "gcc", True), (True, "clang", True), (True, "", False), (False, "gcc", False)]
)
def test_kernels_need_triton_and_a_c_compiler(monkeypatch, triton, compiler, able):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: object() if triton and name == "triton" else None)
    monkeypatch.setattr(platform.shutil, "which", lambda name: f"/usr/bin/{name}" if name == compiler else None)
    assert platform.can_compile() is able


def test_a_c_compiler_may_be_named(monkeypatch):
    monkeypatch.setenv("CC", "my-cc")
    monkeypatch.setattr(platform.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(platform.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "my-cc" else None)
    assert platform.can_compile()
