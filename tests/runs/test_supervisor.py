"""Runs as real processes: start, command, watch, kill, resume, delete. The worker is tests/runs/fake_worker.py."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megatrain.config import RunConfig
from megatrain.errors import RunError
from megatrain.platform import FileLock, look_at_lock, process_identity
from megatrain.runs import supervisor
from megatrain.runs.records import RunState
from megatrain.runs.store import RunStore, load_json
from tests.runs.fake_worker import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent
FAKE = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


def config(name: str = "", num_steps: int = 100000) -> RunConfig:
    plain = RunConfig(name=name)
    return replace(plain, train=replace(plain.train, num_steps=num_steps))


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "WORKER", FAKE)
    folder = tmp_path / "Mein Arbeitsplatz äöü"
    yield folder
    for store in supervisor.list_runs(folder):
        if store.state().pid not in (None, os.getpid()):
            supervisor.force_quit(store)


def wait_until(store: RunStore, *states: RunState, steps: int = 0, seconds: float = 20.0):
    give_up = time.monotonic() + seconds
    while True:
        status = store.state()
        if status.state in states and status.step >= steps:
            return status
        assert time.monotonic() < give_up, f"still {status}\n{store.log_tail()}"
        time.sleep(0.02)


def started(workspace: Path, name: str = "", num_steps: int = 100000, steps: int = 2) -> RunStore:
    store = supervisor.create_run(workspace, config(name, num_steps))
    supervisor.start_worker(store)
    wait_until(store, RunState.RUNNING, steps=steps)
    return store


# ---- folders -----------------------------------------------------------------------------------------------------------
def test_ids_come_from_the_name_and_are_unique_and_plain(workspace):
    names = ["Größe Übung / Test", "", "../../etc/passwd", "x" * 200, "훈련"]
    ids = [supervisor.create_run(workspace, config(name)).run_id for name in names + names]
    assert len(set(ids)) == len(ids)
    assert all(supervisor.RUN_ID.fullmatch(run_id) for run_id in ids)
    assert ids[0].startswith("groe-ubung-test-")
    assert ids[1].startswith("demo-demo-")
    assert ids[4].startswith("run-")


def test_a_double_click_makes_one_run(workspace):
    stores: list[RunStore] = []
    threads = [threading.Thread(target=lambda: stores.append(supervisor.create_run(workspace, config(), "click-1"))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({store.run_id for store in stores}) == 1
    assert supervisor.create_run(workspace, config(), "click-2").run_id != stores[0].run_id
    assert len(supervisor.list_runs(workspace)) == 2


def test_the_list_shows_broken_folders_as_damaged_and_newest_first(workspace):
    assert supervisor.list_runs(workspace) == []
    first = supervisor.create_run(workspace, config("a"))
    second = supervisor.create_run(workspace, config("b"))
    os.utime(workspace / "runs" / first.run_id)
    (workspace / "runs" / "empty").mkdir()
    (workspace / "runs" / "a file").write_text("x", "utf-8")
    os.utime(workspace / "runs" / "empty", (1, 1))
    (second.folder / "run.json").write_text('{"created', "utf-8")
    os.utime(second.folder, (time.time() + 5, time.time() + 5))
    runs = supervisor.list_runs(workspace)
    assert [run.run_id for run in runs] == [second.run_id, first.run_id, "empty"]
    assert [run.state().state for run in runs] == [RunState.CREATED, RunState.CREATED, RunState.DAMAGED]
    with pytest.raises(RunError, match="damaged"):
        supervisor.start_worker(runs[2])
    assert supervisor.delete_run(runs[2]) < 1000


@pytest.mark.parametrize("run_id", ["..", "../runs", "", "a/b", "A", "x" * 41, ".create.lock"])
def test_only_run_ids_find_runs(workspace, run_id):
    supervisor.create_run(workspace, config())
    with pytest.raises(RunError, match="no run"):
        supervisor.find_run(workspace, run_id)


def test_deleting_says_what_it_freed_and_leaves_nothing(workspace):
    store = supervisor.create_run(workspace, config())
    (store.folder / "checkpoints" / "step-1").mkdir(parents=True)
    (store.folder / "checkpoints" / "step-1" / "w").write_bytes(b"0" * 5000)
    assert supervisor.delete_run(store) > 5000
    assert supervisor.list_runs(workspace) == []
    assert [path.name for path in (workspace / "runs").iterdir()] == [".create.lock"]


def test_a_workspace_that_cannot_be_written_is_an_error_with_a_hint(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x", "utf-8")
    with pytest.raises(RunError, match="cannot be written"):
        supervisor.create_run(tmp_path / "file", config())

    def full(self, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunConfig, "save", full)
    with pytest.raises(RunError, match="Free space"):
        supervisor.create_run(tmp_path, config())
    assert supervisor.list_runs(tmp_path) == []


def test_settings_change_only_while_nothing_runs(workspace):
    store = supervisor.create_run(workspace, config())
    changed = supervisor.change_config(store, {"memory.vram_limit_gib": 5.5, "train.learning_rate": 5e-6})
    assert RunConfig.load(store.folder / "config.yaml") == changed
    assert changed.memory.vram_limit_gib == 5.5
    with FileLock(store.folder / "lock").acquire():
        store.set_state(RunState.STARTING)
        with pytest.raises(RunError, match="cannot be changed"):
            supervisor.change_config(store, {"train.learning_rate": 1.0})


# ---- processes ---------------------------------------------------------------------------------------------------------
def test_a_run_trains_to_its_end_and_leaves_a_whole_record(workspace):
    store = supervisor.create_run(workspace, config("short", 30))
    pid = supervisor.start_worker(store)
    status = wait_until(store, RunState.FINISHED)
    assert (status.step, status.num_steps, status.attempt, status.pid) == (30, 30, 1, None)
    assert status.reason == "Finished after step 30."
    assert [row.step for row in store.steps()] == list(range(1, 31))
    assert load_json(store.folder / "data.json") == {"rows_read": 10}
    assert load_json(store.folder / "plan.json")["micro_batch_packs"] == 1
    assert load_json(store.folder / "shape.json")["model_type"] == "fake"
    events = [(event.kind, event.data.get("state") or event.data.get("name") or event.data.get("reason")) for event in store.events()]
    phases = [name for kind, name in events if kind == "phase"]
    assert phases == ["plan", "tokenise", "load", "train"]
    assert [name for kind, name in events if kind == "state"] == ["created", "starting", "starting", "running", "finished"]
    assert ("ended", "finished") in events
    assert store.telemetry()[-1].values["worker_ram_bytes_max"] > 1e6
    assert "step 30/30" in store.log_tail()
    give_up = time.monotonic() + 5
    while (store.fact("exit") or {}).get("code") != 0 and time.monotonic() < give_up:
        time.sleep(0.02)
    assert store.fact("exit") == {"pid": pid, "code": 0}


def test_pause_continue_checkpoint_and_stop(workspace):
    store = started(workspace)
    store.send_command("pause")
    status = wait_until(store, RunState.PAUSED)
    before = store.steps()[-1].step
    time.sleep(0.5)
    assert store.steps()[-1].step == before == status.step
    assert status.reason == f"Paused after step {before}."
    store.send_command("continue")
    wait_until(store, RunState.RUNNING, steps=before + 2)
    store.send_command("checkpoint")
    give_up = time.monotonic() + 5
    while not store.checkpoints():
        assert time.monotonic() < give_up
        time.sleep(0.02)
    store.send_command("stop")
    status = wait_until(store, RunState.STOPPED)
    assert status.pending_command is None
    assert [found.complete for found in store.checkpoints()] == [True, True]
    assert store.checkpoints()[-1].step == status.step
    with pytest.raises(RunError, match="stopped"):
        store.send_command("pause")


def test_stopping_while_paused_and_without_saving(workspace):
    store = started(workspace)
    store.send_command("pause")
    wait_until(store, RunState.PAUSED)
    store.send_command("stop_discard")
    wait_until(store, RunState.STOPPED)
    assert store.checkpoints() == []


@pytest.mark.parametrize(("num_steps", "end"), [(3, RunState.FINISHED), (100000, RunState.STOPPED)])
def test_a_run_whose_disk_is_full_at_the_end_pauses_and_says_so(workspace, num_steps, end):
    store = supervisor.create_run(workspace, config("full disk", num_steps))
    supervisor.start_worker(store)
    if end is RunState.STOPPED:
        wait_until(store, RunState.RUNNING, steps=2)
        store.send_command("stop")
    status = wait_until(store, RunState.PAUSED)
    assert status.reason == "Disk is full; training is paused, nothing is lost."
    assert (status.error.title, status.error.action) == (status.reason.rstrip("."), "free_space")
    assert "No space is left to write" in status.error.text
    assert "continue" in status.error.hint
    store.send_command("continue")
    status = wait_until(store, end)
    assert status.error is None
    assert [found.step for found in store.checkpoints()] == [status.step]
    notices = [event.data["text"] for event in store.events() if event.kind == "notice"]
    assert any(notice.startswith("Disk is full; training is paused, nothing is lost. No space") for notice in notices)


def test_compiled_kernels_are_kept_in_the_workspace_for_the_next_run(workspace, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    store = supervisor.create_run(workspace, config("kernels", 2))
    supervisor.start_worker(store)
    wait_until(store, RunState.FINISHED)
    assert str(workspace.resolve() / "cache" / "kernels") in [event.data["text"] for event in store.events() if event.kind == "notice"]


def test_a_stop_during_preparation_is_heard(workspace):
    store = supervisor.create_run(workspace, config("slow data"))
    supervisor.start_worker(store)
    wait_until(store, RunState.STARTING)
    store.send_command("stop")
    status = wait_until(store, RunState.STOPPED)
    assert (status.step, status.pending_command) == (0, None)


def test_sigterm_stops_and_saves(workspace):
    store = started(workspace)
    os.kill(store.state().pid, signal.SIGTERM)
    status = wait_until(store, RunState.STOPPED)
    assert store.checkpoints()[-1].step == status.step > 0


def test_a_second_start_is_refused(workspace):
    store = supervisor.create_run(workspace, config())
    outcomes = []

    def start() -> None:
        try:
            outcomes.append(supervisor.start_worker(RunStore.open(store.folder)))
        except RunError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([outcome for outcome in outcomes if isinstance(outcome, int)]) == 1
    assert all("Already running" in outcome for outcome in outcomes if isinstance(outcome, str))
    wait_until(store, RunState.RUNNING)
    with pytest.raises(RunError, match="Already running"):
        supervisor.start_worker(store, resume=True)
    with pytest.raises(RunError, match="cannot be deleted"):
        supervisor.delete_run(store)


def test_a_worker_started_beside_a_live_one_ends_without_touching_the_run(workspace):
    store = started(workspace)
    pid = store.state().pid
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = ("import sys; sys.path.insert(0, sys.argv[2]); from megatrain.runs import worker; worker.LOCK_PATIENCE_S = 0.1; "
            "sys.exit(worker.main([sys.argv[1]]))")  # fmt: skip
    second = subprocess.run([sys.executable, "-c", code, str(store.folder), str(ROOT)], env=environment, capture_output=True, check=False)
    assert second.returncode == 4
    assert (store.state().state, store.state().pid) == (RunState.RUNNING, pid)
    assert "Already running" in store.log_tail()


def test_the_worker_outlives_the_dashboard_that_started_it(workspace):
    store = supervisor.create_run(workspace, config())
    code = ("import sys, time\nfrom pathlib import Path\nfrom megatrain.runs import supervisor\n"
            "supervisor.WORKER = tuple(sys.argv[2:])\nstore = supervisor.RunStore.open(Path(sys.argv[1]))\n"
            "supervisor.start_worker(store)\nprint('started', flush=True)\ntime.sleep(60)")  # fmt: skip
    dashboard = subprocess.Popen([sys.executable, "-c", code, str(store.folder), *FAKE], stdout=subprocess.PIPE, text=True,
                                 env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert dashboard.stdout.readline() == "started\n"
    wait_until(store, RunState.RUNNING, steps=1)
    dashboard.kill()
    dashboard.wait()
    dashboard.stdout.close()
    step = store.state().step
    (again,) = supervisor.list_runs(workspace)  # the dashboard is started again
    wait_until(again, RunState.RUNNING, steps=step + 10)
    again.send_command("stop_discard")
    wait_until(again, RunState.STOPPED)


def test_kill_9_is_a_crash_that_is_explained_and_resumed(workspace):
    store = started(workspace)
    store.send_command("checkpoint")
    give_up = time.monotonic() + 5
    while not store.checkpoints() and time.monotonic() < give_up:
        time.sleep(0.02)
    saved = store.checkpoints()[-1].step
    wait_until(store, RunState.RUNNING, steps=saved + 5)
    os.kill(store.state().pid, signal.SIGKILL)
    status = wait_until(store, RunState.CRASHED)
    assert status.ended_s is not None
    give_up = time.monotonic() + 5
    while store.state().error.title != "The run was killed from outside" and time.monotonic() < give_up:
        time.sleep(0.02)  # until the exit code is noted
    error = store.state().error
    assert error.title == "The run was killed from outside"
    assert f"from step {saved}" in error.hint
    seen = store.steps()[-1].id
    supervisor.start_worker(store, resume=True)
    status = wait_until(store, RunState.RUNNING, steps=saved + 3)
    assert status.attempt == 2
    steps = [row.step for row in store.steps()]
    assert steps == list(range(1, steps[-1] + 1))  # nothing twice, nothing missing
    assert store.steps(after_id=seen)[0].step == saved + 1
    notices = [event.data["text"] for event in store.events() if event.kind == "notice"]
    assert any(f"Resumed from step {saved}, epoch" in text and "checksum" in text for text in notices)
    assert any(text.startswith("First loss after the resume") for text in notices)


def test_resuming_from_an_older_checkpoint_leaves_the_later_ones_behind(workspace):
    store = started(workspace)
    for wanted in (1, 2):
        store.send_command("checkpoint")
        give_up = time.monotonic() + 5
        while len(store.checkpoints()) < wanted:
            assert time.monotonic() < give_up
            time.sleep(0.02)
        wait_until(store, RunState.RUNNING, steps=store.state().step + 2)
    store.send_command("stop_discard")
    wait_until(store, RunState.STOPPED)
    early, late = store.checkpoints()
    supervisor.start_worker(store, resume=True, checkpoint=early.name)
    wait_until(store, RunState.RUNNING, steps=early.step + 1)
    assert [found.name for found in store.checkpoints()] == [early.name]
    assert len(list((store.folder / "checkpoints").glob(f"left-{late.name}-*"))) == 1


def test_resume_needs_a_complete_checkpoint_and_a_fresh_start_needs_none(workspace):
    store = supervisor.create_run(workspace, config())
    with pytest.raises(RunError, match="no complete checkpoint"):
        supervisor.start_worker(store, resume=True)
    for number in (9, 100, 90):  # the run went back from 100
        write_checkpoint(store.folder, number)
    (write_checkpoint(store.folder, 200) / "manifest.json").unlink()
    assert supervisor.resume_point(store).step == 90
    assert supervisor.resume_point(store, "step-00000100").step == 100
    with pytest.raises(RunError, match="not complete"):
        supervisor.resume_point(store, "step-00000200")
    with pytest.raises(RunError, match="two trainings"):
        supervisor.start_worker(store)


@pytest.mark.parametrize(("name", "title", "code"), [
    ("fail vram", "The graphics card ran out of memory", 10), ("fail nan", "The loss is no number any more", 11),
    ("fail disk", "The disk is full", 12), ("fail data", "The data cannot be used", 15), ("fail bug", "Training ended with an error", 1),
])  # fmt: skip
def test_failures_are_recorded_with_words_and_distinct_exit_codes(workspace, name, title, code):
    store = supervisor.create_run(workspace, config(name))
    supervisor.start_worker(store)
    status = wait_until(store, RunState.FAILED)
    assert status.error.title == status.reason == title
    assert status.step == 3
    assert "Traceback" in store.log_tail()
    assert "hf_abcdefgh12345678" not in store.log_tail() + status.error.text
    give_up = time.monotonic() + 5
    while not store.fact("exit") and time.monotonic() < give_up:
        time.sleep(0.02)
    assert store.fact("exit")["code"] == code


def test_a_loss_that_is_no_number_does_not_break_the_record(workspace):
    store = supervisor.create_run(workspace, config("nan", 10))
    supervisor.start_worker(store)
    wait_until(store, RunState.FINISHED)
    assert [row.loss for row in store.steps()] == [None] * 10


def test_a_worker_that_cannot_even_start_is_explained(workspace, monkeypatch):
    monkeypatch.setattr(supervisor, "WORKER", (sys.executable, "-c", "import no_such_package"))
    store = supervisor.create_run(workspace, config())
    supervisor.start_worker(store)
    status = wait_until(store, RunState.CRASHED)
    assert status.error.title == "A package is missing"
    monkeypatch.setattr(supervisor, "WORKER", ("/nowhere/python",))
    with pytest.raises(RunError, match="cannot be started"):
        supervisor.start_worker(store)
    assert store.state().state is RunState.FAILED


def test_force_quit_takes_the_children_too(workspace):
    store = started(workspace, "children", steps=4)
    child = next(int(event.data["text"].split()[1]) for event in store.events() if event.data.get("text", "").startswith("child"))
    assert psutil.pid_exists(child)
    supervisor.force_quit(store)
    status = store.state()
    assert status.state is RunState.STOPPED
    assert "Forced" in status.reason
    give_up = time.monotonic() + 5
    while process_identity(child) is not None:
        assert time.monotonic() < give_up
        time.sleep(0.02)
    with pytest.raises(RunError, match="no process"):
        supervisor.force_quit(store)


def test_the_heartbeat_moves_while_a_worker_lives(workspace):
    store = started(workspace)
    first = store.state().heartbeat_s
    give_up = time.monotonic() + 5
    while store.state().heartbeat_s == first:
        assert time.monotonic() < give_up
        time.sleep(0.05)
    assert look_at_lock(store.folder / "lock")[0] is True


def test_an_old_stop_does_not_stop_the_resumed_run(workspace):
    store = started(workspace)
    store.send_command("checkpoint")
    give_up = time.monotonic() + 5
    while not store.checkpoints() and time.monotonic() < give_up:
        time.sleep(0.02)
    store.send_command("pause")
    wait_until(store, RunState.PAUSED)
    pid = store.state().pid
    os.kill(pid, signal.SIGSTOP)  # it cannot take commands any more
    store.send_command("stop")
    os.kill(pid, signal.SIGKILL)
    wait_until(store, RunState.CRASHED)
    supervisor.start_worker(store, resume=True)
    wait_until(store, RunState.RUNNING, steps=store.checkpoints()[-1].step + 3)


def test_a_failed_export_is_an_event(workspace, monkeypatch):
    store = supervisor.create_run(workspace, config())
    write_checkpoint(store.folder, 5)
    monkeypatch.setattr(supervisor, "EXPORT", (sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(3)"))
    supervisor.start_export(store, "step-00000005", "bf16")
    give_up = time.monotonic() + 5
    while True:
        events = [event.data for event in store.events() if event.kind == "export"]
        if len(events) == 2:
            break
        assert time.monotonic() < give_up
        time.sleep(0.02)
    assert events[0]["state"] == "started" or events[1]["state"] == "started"
    assert any("exit code 3" in event.get("text", "") for event in events)
    assert "step-00000005-bf16" in (store.folder / "exports" / "export.log").read_text("utf-8")
    assert supervisor.latest_export(store)["state"] == "failed"
    with pytest.raises(RunError):
        supervisor.start_export(store, "../../etc", "bf16")


def test_an_export_whose_process_is_gone_has_failed(workspace):
    store = supervisor.create_run(workspace, config())
    assert supervisor.latest_export(store) is None
    here = {"pid": os.getpid(), "identity": process_identity(os.getpid())}
    store.log_event("export", {"state": "started", "target": "x", **here})
    store.log_event("export", {"state": "running", "target": "x", "done": 1, "total": 2})
    assert supervisor.latest_export(store)["state"] == "running"
    store.log_event("export", {"state": "started", "target": "x", "pid": os.getpid(), "identity": "of a process before"})
    store.log_event("export", {"state": "running", "target": "x", "done": 1, "total": 2})
    assert supervisor.latest_export(store)["state"] == "failed"
    store.log_event("export", {"state": "finished", "target": "x"})
    assert supervisor.latest_export(store)["state"] == "finished"


def test_the_worker_gets_arguments_as_a_list_and_the_environment(workspace, monkeypatch, tmp_path):
    out = tmp_path / "out.json"
    seen = "[os.environ.get(name) for name in ('OMP_NUM_THREADS', 'CUDA_DEVICE_ORDER')]"
    code = f"import json, os, sys; json.dump([sys.argv[1:], *{seen}], open({str(out)!r}, 'w'))"
    monkeypatch.setattr(supervisor, "WORKER", (sys.executable, "-c", code))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    store = supervisor.create_run(workspace, config("$(touch hacked); `x`"))
    supervisor.start_worker(store)
    wait_until(store, RunState.CRASHED)
    assert json.loads(out.read_text("utf-8")) == [[str(store.folder.resolve())], "3", "PCI_BUS_ID"]


def test_paths_of_a_run_hold_from_any_folder(workspace, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("{}", "utf-8")
    monkeypatch.chdir(tmp_path)
    raw = RunConfig().to_dict()
    raw["data"]["path"], raw["memory"]["offload_folder"] = "rows.jsonl", "fast/disk"
    made = RunConfig.load(supervisor.create_run(workspace, RunConfig.from_dict(raw)).folder / "config.yaml")
    assert made.data.path == str(tmp_path / "rows.jsonl")
    assert made.memory.offload_folder == str(tmp_path / "fast" / "disk")
    assert made.model.path == "demo"
    raw["data"]["path"], raw["model"]["path"] = "owner/rows", "owner/model"
    made = RunConfig.load(supervisor.create_run(workspace, RunConfig.from_dict(raw)).folder / "config.yaml")
    assert (made.data.path, made.model.path) == ("owner/rows", "owner/model")
