"""Server functions answer in words whatever they are asked: anybody who reaches the port can call them."""

import pytest

from megatrain.runs.records import RunState
from tests.ui.fake_runs import FakeRun
from ui import widgets
from ui.feed import Feeds

NONSENSE = [None, 3, "x", [], {}, {"run": "../../etc"}, {"run": ["a"]}, {"run": "no-such-run", "action": "pause"}]


def function(widget, name):
    return getattr(widget, name)


@pytest.fixture
def run(tmp_path):
    fake = FakeRun(tmp_path).start(20).train(20)
    yield fake
    fake.close()


@pytest.mark.parametrize("asked", NONSENSE)
def test_nonsense_is_answered(run, tmp_path, asked):
    feeds = Feeds(tmp_path)
    assert function(widgets.status_strip(feeds), "status")(asked)["run"] == run.run_id
    assert function(widgets.live_charts(feeds), "poll")(asked)["run"] == run.run_id
    assert function(widgets.run_head(feeds), "diagnostics")(asked).keys() == {"error"}
    assert "error" in widgets.acting(feeds)(asked)
    assert run.store.state().pending_command is None


def test_figures_come_once(run, tmp_path):
    poll = function(widgets.live_charts(Feeds(tmp_path)), "poll")
    first = poll({"run": run.run_id})
    assert {"figures", "events"} <= first.keys()
    again = poll({"run": run.run_id, "seen": first["seen"], "log_offset": first["log"]["offset"]})
    assert not {"figures", "events"} & again.keys()
    assert again["log"]["text"] == ""
    run.train(1)
    assert "figures" in poll({"run": run.run_id, "seen": first["seen"]})


def test_the_strip_prefers_what_is_live(run, tmp_path):
    ended = FakeRun(tmp_path, "ended").start(5).train(5)
    ended.state(RunState.FINISHED)
    status = function(widgets.status_strip(Feeds(tmp_path)), "status")
    assert status({"run": ended.run_id})["run"] == run.run_id
    run.state(RunState.STOPPED)
    assert status({"run": ended.run_id})["run"] == ended.run_id


def test_an_empty_workspace(tmp_path):
    feeds = Feeds(tmp_path)
    assert function(widgets.status_strip(feeds), "status")({"run": ""})["word"] == "No run yet"
    assert function(widgets.live_charts(feeds), "poll")({})["run"] == ""
    assert function(widgets.run_head(feeds), "runs")({}) == {"runs": []}


def test_a_run_that_cannot_be_read_now_is_asked_again(run, tmp_path, monkeypatch):
    feeds = Feeds(tmp_path)
    poll = function(widgets.live_charts(feeds), "poll")
    monkeypatch.setattr(feeds.of(run.run_id), "rows", lambda: (_ for _ in ()).throw(FileNotFoundError("gone")))
    assert poll({"run": run.run_id}) == {"again": "gone"}
