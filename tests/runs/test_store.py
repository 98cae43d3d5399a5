"""The record of a run: rows in and out, states, commands, and what happens to it when the disk or the file is bad."""

import json
import logging
import math
import os
import socket
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from megatrain.config import RunConfig
from megatrain.engine.events import StepDone
from megatrain.errors import RunError
from megatrain.platform import FileLock, Holder
from megatrain.runs import reading
from megatrain.runs.records import RunState, to_json
from megatrain.runs.store import RunStore
from tests.runs.fake_worker import write_checkpoint


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "Läufe mit Leerzeichen" / "run-1"
    made = RunStore.open(folder, create=True)
    RunConfig().save(folder / "config.yaml")
    yield made
    made.close()


def step(number: int, loss: float = 1.0, **changes) -> StepDone:
    return StepDone(**{"step": number, "loss": loss, "grad_norm": 2.0, "learning_rate": 1e-5, "num_tokens": 100, "trained_tokens": 60,
                       "step_s": 0.5, "epoch": 0.1, "bytes_moved": {"h2d": 5}, "waits_s": {"data": 0.1}, **changes})  # fmt: skip


def test_steps_come_back_as_they_were_and_only_the_new_ones(store):
    for number in range(1, 6):
        store.log_step(step(number, loss=number / 3))
    rows = store.steps()
    assert [row.step for row in rows] == [1, 2, 3, 4, 5]
    assert rows[2].loss == 1.0
    assert rows[0].tokens_per_s == 200.0
    assert rows[0].bytes == {"h2d": 5}
    assert rows[0].waits == {"data": 0.1}
    assert [row.step for row in store.steps(after_id=rows[3].id)] == [5]
    assert [row.step for row in store.steps(limit=2)] == [1, 2]


def test_numbers_that_are_none_become_null_and_json_stays_valid(store):
    store.log_step(step(1, loss=math.nan, grad_norm=math.inf, bytes_moved={"h2d": 3}, waits_s={"x": math.nan}, step_s=0.0))
    store.log_telemetry(1.0, {"a_mean": math.inf, "b_mean": None, "c_mean": 2.0})
    store.log_event("eval", {"loss": -math.inf, "path": Path("x"), "nested": [math.nan, {"deep": math.nan}]})
    row = store.steps()[0]
    assert (row.loss, row.grad_norm, row.tokens_per_s, row.waits) == (None, None, None, {"x": None})
    assert store.telemetry()[0].values == {"a_mean": None, "b_mean": None, "c_mean": 2.0}
    assert store.events()[-1].data == {"loss": None, "path": "x", "nested": [None, {"deep": None}]}
    numpy = pytest.importorskip("numpy")
    assert json.loads(to_json({"i": numpy.int64(3), "f": numpy.float32(0.5)})) == {"i": 3, "f": 0.5}


def test_states_follow_each_other_only_in_order(store):
    assert store.state().state is RunState.CREATED
    for state in (RunState.STARTING, RunState.RUNNING, RunState.PAUSED, RunState.RUNNING, RunState.STOPPING, RunState.STOPPED):
        store.set_state(state, f"now {state}")
    status = store.state()
    assert (status.state, status.reason) == (RunState.STOPPED, "now stopped")
    assert status.ended_s is not None
    with pytest.raises(RunError, match="stopped cannot become running"):
        store.set_state(RunState.RUNNING)
    assert [event.data["state"] for event in store.events() if event.kind == "state"][-1] == "stopped"
    RunStore.open(store.folder).set_state(RunState.STARTING)  # a resume, from another process


def test_truncating_forgets_later_steps_and_ids_are_never_used_twice(store):
    for number in range(1, 11):
        store.log_step(step(number))
    store.log_event("eval", {"step": 4, "loss": 1.0})
    store.log_event("eval", {"step": 9, "loss": 1.0})
    seen = store.steps()[-1].id
    store.truncate_after(6)
    store.log_step(step(7))
    assert [row.step for row in store.steps()] == [1, 2, 3, 4, 5, 6, 7]
    assert [row.step for row in store.steps(after_id=seen)] == [7]
    assert [event.data["step"] for event in store.events() if event.kind == "eval"] == [4]


def test_commands_reach_a_live_run_once_and_in_order(store):
    with pytest.raises(RunError, match="created"):
        store.send_command("pause")
    with pytest.raises(RunError, match="no command"):
        store.send_command("rm -rf")
    with FileLock(store.folder / "lock").acquire():
        store.set_state(RunState.STARTING)
        store.set_state(RunState.RUNNING)
        page = RunStore.open(store.folder)
        page.send_command("pause")
        page.send_command("pause")  # a second click
        page.send_command("checkpoint")
        assert store.state().pending_command == "pause"
        assert [store.take_command() for _ in range(3)] == ["pause", "checkpoint", None]
        assert store.state().pending_command is None


def test_a_run_whose_process_is_gone_is_crashed_and_explained(store):
    store.set_state(RunState.STARTING)
    store.set_state(RunState.RUNNING)
    store.log_step(step(12))
    (store.folder / "worker.log").write_text("all is well\n", "utf-8")
    status = store.state()
    assert status.state is RunState.CRASHED
    assert status.error.title == "The process vanished"
    assert "after step 12" in status.error.text
    assert status.pid is None
    assert not status.is_active


@pytest.mark.parametrize("identity", ["boot x ticks 1", None])
def test_a_lock_held_by_a_forked_child_of_a_dead_worker_does_not_make_it_live(store, identity):
    store.set_state(RunState.STARTING)
    store.set_state(RunState.RUNNING)
    with FileLock(store.folder / "lock").acquire() as lock:
        assert store.state().state is RunState.RUNNING
        if identity:  # the pid is used by another process now
            record = json.loads(lock.path.read_text("utf-8"))
            lock.path.write_text(json.dumps(record | {"identity": identity}), "utf-8")
            assert store.state().state is RunState.CRASHED
        else:  # on another host only the lock counts
            record = json.loads(lock.path.read_text("utf-8"))
            lock.path.write_text(json.dumps(record | {"identity": "x", "host": socket.gethostname() + "-2"}), "utf-8")
            assert store.state().state is RunState.RUNNING


def test_without_locks_the_heartbeat_of_another_host_decides(store, monkeypatch):
    holder = Holder(pid=1, identity="x", host="elsewhere", started_s=0.0)
    lock = store.folder / "lock"
    lock.touch()
    monkeypatch.setattr(reading, "look_at_lock", lambda path: (None, holder))
    assert reading.worker_lives(store.folder)
    os.utime(lock, (time.time() - 100, time.time() - 100))
    assert not reading.worker_lives(store.folder)


def test_an_end_between_two_looks_is_no_crash(store, monkeypatch):
    """The reader reads `running`, then the worker ends properly, then the reader sees the lock free."""
    store.set_state(RunState.STARTING)
    store.set_state(RunState.RUNNING)
    real = reading.worker_lives

    def ends_now(folder, stored):
        monkeypatch.setattr(reading, "worker_lives", real)
        store.set_state(RunState.FINISHED)
        return False

    monkeypatch.setattr(reading, "worker_lives", ends_now)
    assert RunStore.open(store.folder).state().state is RunState.FINISHED


def test_background_rows_are_written_in_batches_and_all_are_there_after_close(store):
    store.start_background()
    for number in range(1, 501):
        store.log_step(step(number))
    assert store.close()
    assert len(store.steps()) == 500


def test_two_writers_do_not_lose_rows(store):
    other = RunStore.open(store.folder)
    store.start_background()
    thread = threading.Thread(target=lambda: [other.log_event("export", {"n": n}) for n in range(50)])
    thread.start()
    for number in range(1, 51):
        store.log_step(step(number))
        time.sleep(0.002)
    thread.join()
    assert store.close()
    assert len(store.steps()) == 50
    assert len([event for event in store.events() if event.kind == "export"]) == 50


def test_a_locked_database_holds_nobody_up(store, caplog):
    store.start_background()
    blocker = sqlite3.connect(store.folder / "run.sqlite", isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    began = time.monotonic()
    for number in range(1, 101):
        store.log_step(step(number))
    assert time.monotonic() - began < 0.5  # a hundred appends to a list
    with caplog.at_level(logging.WARNING):
        deadline = time.monotonic() + 5
        while not store.trouble and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "locked" in store.trouble
        assert store.steps() == []
        blocker.execute("COMMIT")
        blocker.close()
        assert store.close()
    assert len(store.steps()) == 100
    assert any("rows wait in memory" in line for line in caplog.messages)
    assert "The run's record is written again." in caplog.messages


def test_a_full_disk_costs_no_rows_while_the_process_lives(store):
    store.start_background()
    pages = store._database._held.execute("PRAGMA page_count").fetchone()[0]
    store._database._held.execute(f"PRAGMA max_page_count={pages}")  # SQLite says "database or disk is full"
    for number in range(1, 301):
        store.log_step(step(number))
    deadline = time.monotonic() + 5
    while not store.trouble and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "full" in store.trouble
    store._database._held.execute("PRAGMA max_page_count=1000000")
    assert store.close()
    assert len(store.steps()) == 300


def test_rows_that_could_never_be_written_are_counted_in_the_log(store, caplog):
    store.start_background()
    store._database._held.execute("PRAGMA max_page_count=1")
    for number in range(1, 301):
        store.log_step(step(number))
    assert store.close(patience_s=0.1) is False
    assert any("rows of this run's record could not be written" in line for line in caplog.messages)


@pytest.mark.parametrize("damage", [b"", b"this is no database", b"SQLite format 3\0" + b"\xff" * 4000])
def test_a_damaged_record_is_set_aside_and_the_run_goes_on(store, damage):
    store.set_state(RunState.STARTING)
    store.close()
    (store.folder / "run.sqlite").write_bytes(damage)
    for suffix in ("-wal", "-shm"):
        (store.folder / f"run.sqlite{suffix}").unlink(missing_ok=True)
    again = RunStore.open(store.folder)
    kept = list(store.folder.glob("run.sqlite.damaged-*"))
    assert len(kept) == 1
    assert kept[0].read_bytes() == damage
    status = again.state()
    assert status.state is RunState.FAILED
    assert status.error.action == "resume"
    assert kept[0].name in again.events()[0].data["text"]
    again.set_state(RunState.STARTING)


def test_a_record_damaged_under_a_live_worker_is_replaced_by_the_worker_alone(store):
    with FileLock(store.folder / "lock").acquire():
        store.start_background()
        store.set_state(RunState.STARTING)
        store.set_state(RunState.RUNNING)
        store.set_fact("num_steps", 77)
        store.log_step(step(1))
        deadline = time.monotonic() + 5
        while not store.steps() and time.monotonic() < deadline:
            time.sleep(0.01)
        store._database.drop()
        store._database._held = None
        for suffix in ("-wal", "-shm"):
            (store.folder / f"run.sqlite{suffix}").unlink(missing_ok=True)
        (store.folder / "run.sqlite").write_bytes(b"garbage " * 1000)
        store.log_step(step(2))
        assert store.close()
        status = store.state()
    assert (status.state, status.num_steps) == (RunState.RUNNING, 77)
    assert [row.step for row in store.steps()] == [2]


def test_a_folder_without_its_files_is_damaged_not_an_error(store, tmp_path):
    (store.folder / "config.yaml").unlink()
    assert store.state().state is RunState.DAMAGED
    (tmp_path / "empty").mkdir()
    status = RunStore(tmp_path / "empty").state()
    assert status.state is RunState.DAMAGED
    assert status.error.action == "delete"
    with pytest.raises(RunError, match="holds no run"):
        RunStore.open(tmp_path / "empty")
    with pytest.raises(RunError, match="no run in"):
        RunStore.open(tmp_path / "nothing")


def test_checkpoints_are_ordered_by_number_and_only_whole_ones_are_complete(store):
    for number in (90, 100, 1000000000):
        write_checkpoint(store.folder, number)
    (store.folder / "checkpoints" / "step-00000100" / "block-0000.safetensors").write_bytes(b"ab")  # truncated
    (store.folder / "checkpoints" / "step-00000105").mkdir()  # no manifest
    (store.folder / "checkpoints" / ".step-00000110.tmp").mkdir()
    found = store.checkpoints()
    assert [(info.step, info.complete) for info in found] == [(90, True), (100, False), (105, False), (1000000000, True)]


def test_the_summary_reads_few_rows_of_a_long_run(store):
    store.start_background()
    for number in range(1, 2001):
        store.log_step(step(number, loss=10 / number))
    store.log_event("eval", {"step": 2000, "loss": 0.5})
    store.close()
    summary = store.summary(points=10)
    assert summary.last_loss == summary.best_loss == 10 / 2000
    assert summary.last_eval_loss == 0.5
    assert summary.tokens_per_s == 200.0
    assert len(summary.sparkline) == 10
    assert summary.sparkline[0] == 10.0


def test_a_read_only_copy_can_be_looked_at(store, monkeypatch):
    store.log_step(step(1))
    store.close()
    real = sqlite3.connect

    def read_only(address: str, **options):
        if "mode=rw" in address:
            error = sqlite3.OperationalError("attempt to write a readonly database")
            error.sqlite_errorcode = sqlite3.SQLITE_READONLY
            raise error
        return real(address, **options)

    monkeypatch.setattr(sqlite3, "connect", read_only)
    assert [row.step for row in RunStore(store.folder).steps()] == [1]


def test_log_tail_shows_the_end_whatever_bytes_it_holds(store):
    assert store.log_tail() == ""
    (store.folder / "worker.log").write_bytes(b"x" * 100 + b"\xff\xfe end\n")
    assert store.log_tail(8).endswith(" end\n")


def test_a_deleted_folder_stops_its_worker(store, tmp_path, caplog):
    store.start_background()
    store.log_step(step(1))
    store.folder.rename(tmp_path / "elsewhere")
    give_up = time.monotonic() + 10
    while (command := store.take_command()) is None:
        assert time.monotonic() < give_up
        time.sleep(0.02)
    assert command == "stop_discard"
    assert "moved or deleted" in caplog.text
    time.sleep(1.2)
    assert store.take_command() is None
