"""What the Runs page says of runs that go on, ended, crashed or are damaged, and what its buttons do."""

import time

import pytest

from megatrain.errors import RunError
from megatrain.runs.records import CheckpointInfo, RunState, RunStatus
from megatrain.runs.supervisor import list_runs
from tests.ui.fake_runs import FakeRun
from ui.feed import Feeds
from ui.pages import runs as page
from ui.run_list import RunList, buttons


@pytest.fixture
def workspace(tmp_path):
    made = []

    def run(*arguments, **options):
        made.append(FakeRun(tmp_path, *arguments, **options))
        return made[-1]

    run.folder = tmp_path
    yield run
    for fake in made:
        fake.close()


@pytest.fixture
def called(monkeypatch):
    calls = []
    monkeypatch.setattr(page, "start_worker", lambda store, **options: calls.append(("worker", store.run_id, options)))
    monkeypatch.setattr(page, "start_export", lambda store, *options: calls.append(("export", store.run_id, options)))
    return calls


def checkpoint(step, complete=True):
    return CheckpointInfo(name=f"step-{step:08d}", step=step, path=None, num_bytes=5, time_s=0.0, complete=complete)


def enabled(status, checkpoints):
    return {action for action, spec in buttons(status, checkpoints, 0).items() if spec["enabled"]}


def test_a_line_of_each_kind(workspace):
    live = workspace("live").start(60).train(60)
    crashed = workspace("gone").start(60).train(30)
    crashed.vanish()
    damaged = workspace.folder / "runs" / "no-record"
    damaged.mkdir()
    lines = {line["run"]: line for line in RunList(Feeds(workspace.folder)).lines()}
    assert set(lines) == {live.run_id, crashed.run_id, "no-record"}
    assert lines[live.run_id]["state"] == "running"
    assert lines[live.run_id]["steps"] == "60 / 3,000"
    assert lines[live.run_id]["progress"] == pytest.approx(0.02)
    assert len(lines[live.run_id]["line"]) > 10
    assert float(lines[live.run_id]["best"]) <= float(lines[live.run_id]["last"])
    assert lines[crashed.run_id]["state"] == "crashed"
    assert lines[crashed.run_id]["reason"]
    assert lines["no-record"]["state"] == "damaged"
    assert "run.sqlite" in lines["no-record"]["reason"]
    assert lines["no-record"]["last"] == "–"


def test_the_detail_of_a_crashed_run_explains_it(workspace):
    run = workspace("gone").start(60).train(60)
    run.vanish()
    detail = RunList(Feeds(workspace.folder)).detail(run.run_id)
    assert detail["explanation"]["title"]
    assert detail["explanation"]["text"]
    assert "global_batch_tokens" in detail["yaml"]
    assert detail["buttons"]["start"]["enabled"]


def test_the_detail_of_a_damaged_folder(workspace):
    folder = workspace.folder / "runs" / "no-record"
    folder.mkdir(parents=True)
    detail = RunList(Feeds(workspace.folder)).detail("no-record")
    assert detail["explanation"]["title"]
    assert [action for action, spec in detail["buttons"].items() if spec["enabled"]] == ["delete"]


@pytest.mark.parametrize("run_id", ["../etc", "no such", "", None, {"a": 1}, "a" * 60, "missing"])
def test_only_ids_of_runs_are_looked_up(workspace, run_id):
    with pytest.raises(RunError):
        RunList(Feeds(workspace.folder)).detail(run_id)


@pytest.mark.parametrize(
    ("state", "checkpoints", "expected"),
    [
        (RunState.RUNNING, [checkpoint(10)], {"export", "open", "duplicate"}),
        (RunState.STOPPED, [checkpoint(10)], {"resume", "export", "open", "duplicate", "delete"}),
        (RunState.CRASHED, [checkpoint(10, complete=False)], {"start", "open", "duplicate", "delete"}),
        (RunState.CREATED, [], {"start", "open", "duplicate", "delete"}),
        (RunState.FINISHED, [checkpoint(10)], {"export", "open", "duplicate", "delete"}),
        (RunState.FINISHED, [], {"open", "duplicate", "delete"}),
        (RunState.DAMAGED, [], {"delete"}),
    ],
)
def test_what_can_be_done(state, checkpoints, expected):
    assert enabled(RunStatus(state), checkpoints) == expected


def test_a_button_that_is_off_says_why():
    for state in RunState:
        for spec in buttons(RunStatus(state), [], 0).values():
            assert spec["enabled"] != bool(spec["why"])


def test_deleting_says_what_it_frees():
    assert "3.00 GiB" in buttons(RunStatus(RunState.STOPPED), [], 3 * 1024**3)["delete"]["ask"]


def test_the_latest_export_is_shown(workspace):
    run = workspace("exported").start(60).train(60)
    run.event("export", {"state": "started", "checkpoint": "step-00000100", "target": "/x", "pid": 0, "identity": ""})
    run.event("export", {"state": "running", "checkpoint": "step-00000100", "target": "/x", "done": 3, "total": 12})
    run.event("export", {"state": "finished", "checkpoint": "step-00000100", "target": "/x", "text": "transformers loaded it."})
    export = RunList(Feeds(workspace.folder)).detail(run.run_id)["export"]
    assert export["tone"] == "ok"
    assert export["text"] == "transformers loaded it."
    assert export["target"] == "/x"


def test_actions_reach_the_supervisor(workspace, called):
    store = workspace("a").store
    page.carry_out(store, {"action": "resume", "checkpoint": "step-00000100"})
    page.carry_out(store, {"action": "start"})
    page.carry_out(store, {"action": "export", "checkpoint": "step-00000100", "type": "fp32"})
    assert called == [
        ("worker", store.run_id, {"resume": True, "checkpoint": "step-00000100"}),
        ("worker", store.run_id, {}),
        ("export", store.run_id, ("step-00000100", "fp32")),
    ]


@pytest.mark.parametrize(
    "request_",
    [{}, {"action": "rm -rf"}, {"action": "export", "type": "int1", "checkpoint": "x"}, {"action": "export", "type": "bf16"}, None, [1]],
)
def test_senseless_requests_do_nothing(workspace, called, request_):
    with pytest.raises(RunError):
        page.carry_out(workspace("a").store, request_)
    assert not called


def test_delete_frees_the_folder_and_refuses_a_live_run(workspace):
    live = workspace("live").start(10).train(10)
    with pytest.raises(RunError):
        page.carry_out(live.store, {"action": "delete"})
    live.state(RunState.STOPPED)
    assert page.carry_out(live.store, {"action": "delete"})["said"]
    until = time.monotonic() + 20
    while live.folder.exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert list_runs(workspace.folder) == []
