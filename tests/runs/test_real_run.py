"""The real worker with the real engine: killed or stopped, resumed, and equal to the bit to a run that never stopped."""

import dataclasses
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from megatrain.config import RunConfig
from megatrain.errors import RunError
from megatrain.runs import supervisor, worker
from megatrain.runs.records import RunState
from megatrain.runs.store import RunStore
from tests.runs.tiny_model import write_model, write_rows

NUM_STEPS = 60


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("Arbeit mit Umlaut ü")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    return folder


def config(workspace: Path, precision: str, **data) -> RunConfig:
    raw = RunConfig().to_dict()
    raw["precision"] = precision
    raw["model"]["path"] = str(workspace / "model")
    raw["data"] |= {"path": str(workspace / "rows.jsonl"), "sequence_length": 64, "eval_fraction": 0.1, **data}
    raw["train"] |= {"global_batch_tokens": 256, "num_steps": NUM_STEPS, "learning_rate": 1e-3}
    raw["checkpoint"] |= {"every_steps": 5, "keep": 2}
    raw["evaluation"] |= {"every_steps": 20}
    return RunConfig.from_dict(raw)


def wait_until(store: RunStore, *states: RunState, steps: int = 0):
    give_up = time.monotonic() + 180
    while True:
        status = store.state()
        if status.state in states and status.step >= steps:
            return status
        assert time.monotonic() < give_up, f"{status}\n{store.log_tail()}"
        assert status.is_active or status.state in (RunState.CREATED, *states), f"{status}\n{store.log_tail()}"
        time.sleep(0.02)


def final_states(store: RunStore) -> dict[str, bytes]:
    newest = supervisor.resume_point(store)
    assert newest.step == NUM_STEPS
    return {path.name: path.read_bytes() for path in sorted(newest.path.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def straight(workspace):
    """The run that is never stopped, trained in this process."""
    store = supervisor.create_run(workspace, config(workspace, "bf16"))
    assert worker.run(store.folder) == worker.FINISHED
    assert store.steps()[-1].epoch > 2
    return store


def assert_equal_to_straight(store: RunStore, straight: RunStore, break_step: int) -> None:
    """`store`, resumed after it was broken at `break_step`, is over: every step and every final state is the straight run's, to the bit."""
    found, wanted = ([(row.step, row.loss, row.grad_norm, row.learning_rate) for row in run.steps()] for run in (store, straight))
    assert found == wanted
    assert final_states(store) == final_states(straight)
    notices = [event.data["text"] for event in store.events() if event.kind == "notice"]
    assert any(f"Resumed from step {break_step}, epoch" in text for text in notices)
    assert len(store.checkpoints()) <= 3  # two, and the one that was resumed from


def test_killed_and_resumed_is_equal_to_never_stopped(workspace, straight):
    store = supervisor.create_run(workspace, config(workspace, "bf16"))
    supervisor.start_worker(store)
    wait_until(store, RunState.RUNNING, steps=12)
    os.kill(store.state().pid, signal.SIGKILL)
    status = wait_until(store, RunState.CRASHED)
    saved = supervisor.resume_point(store).step
    assert 5 <= saved <= status.step
    supervisor.start_worker(store, resume=True)
    wait_until(store, RunState.FINISHED)
    assert_equal_to_straight(store, straight, saved)


def test_paused_stopped_and_resumed_is_equal_to_never_stopped(workspace, straight):
    store = supervisor.create_run(workspace, config(workspace, "bf16"))
    codes: list[int] = []
    training = threading.Thread(target=lambda: codes.append(worker.run(store.folder)))
    training.start()
    wait_until(store, RunState.RUNNING, steps=1)
    store.send_command("pause")
    wait_until(store, RunState.PAUSED)
    store.send_command("continue")
    store.send_command("stop")
    training.join()
    assert codes == [worker.STOPPED]
    status = store.state()
    assert supervisor.resume_point(store).step == status.step < NUM_STEPS
    assert worker.run(store.folder, resume=True) == worker.FINISHED  # the killed run's test resumes in a process of its own
    assert_equal_to_straight(store, straight, status.step)


def test_data_without_a_trained_token_ends_before_training_with_the_reason(workspace):
    rows = workspace / "empty.jsonl"
    rows.write_text('{"prompt": "a", "completion": ""}\n' * 3, "utf-8")
    store = supervisor.create_run(workspace, config(workspace, "fp32", path=str(rows)))
    assert worker.run(store.folder) == 15
    status = store.state()
    assert (status.state, status.step) == (RunState.FAILED, 0)
    assert status.error.title == "The data cannot be used"
    assert status.error.action == "choose_data"
    with pytest.raises(RunError):
        supervisor.start_worker(store, resume=True)


def test_a_tokenizer_of_another_model_ends_before_training_with_the_reason(workspace, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(workspace / "model", model)
    raw = json.loads((model / "config.json").read_text("utf-8"))
    (model / "config.json").write_text(json.dumps(raw | {"vocab_size": 8}), "utf-8")
    chosen = config(workspace, "fp32")
    chosen = dataclasses.replace(chosen, model=dataclasses.replace(chosen.model, path=str(model), from_scratch=True))
    store = supervisor.create_run(workspace, chosen)
    assert worker.run(store.folder) == 15
    assert "The tokenizer belongs to another model" in store.state().error.hint


def test_a_plan_that_does_not_fit_ends_before_training_with_the_change(workspace, monkeypatch):
    monkeypatch.setenv("MEGATRAIN_RAM_BYTES", "1000000")
    store = supervisor.create_run(workspace, config(workspace, "fp32"))
    assert worker.run(store.folder) == 14
    assert store.state().error.action == "change_plan"
