"""Rows are read once, forgotten when a run goes back to a checkpoint, and the log comes in whole lines."""

import shutil

import pytest

from megatrain.errors import RunError
from megatrain.runs.records import RunState
from tests.ui.fake_runs import FakeRun
from ui.feed import LOG_BYTES, Feeds, RunFeed


@pytest.fixture
def run(tmp_path):
    fake = FakeRun(tmp_path)
    yield fake
    fake.close()


def test_only_what_is_new_is_read(run, monkeypatch):
    run.start(30).train(30)
    feed = RunFeed(run.store)
    before = feed.rows()
    asked = []
    steps = run.store.steps
    monkeypatch.setattr(run.store, "steps", lambda after_id, limit: asked.append(after_id) or steps(after_id, limit))
    assert feed.rows().seen == before.seen
    run.train(2)
    after = feed.rows()
    assert len(after.steps) == 32
    assert asked == [30, 30, 32]
    assert after.seen != before.seen


def test_a_resume_forgets_the_steps_that_are_trained_again(run):
    run.start(30).train(30)
    feed = RunFeed(run.store)
    assert len(feed.rows().steps) == 30
    run.store.truncate_after(20)
    run.fact("attempt", 2)
    assert feed.rows().steps["step"].tolist() == list(range(1, 21))


def test_stages_of_an_earlier_start_do_not_count(run):
    run.start()
    assert "load" in RunFeed(run.store).rows().phases
    run.state(RunState.STOPPED)
    run.state(RunState.STARTING)
    assert RunFeed(run.store).rows().phases == {}


def test_whether_there_is_a_gpu_is_what_the_plan_says(tmp_path):
    assert RunFeed(FakeRun(tmp_path, gpu=True).store).rows().has_gpu
    assert not RunFeed(FakeRun(tmp_path, gpu=False).store).rows().has_gpu


def test_a_missing_or_broken_plan_is_no_plan(run):
    (run.folder / "plan.json").write_text("{", "utf-8")
    assert RunFeed(run.store).rows().predicted is None
    (run.folder / "plan.json").unlink()
    assert RunFeed(run.store).rows().predicted is None


def test_the_log_comes_by_offset_in_whole_lines(run):
    feed = RunFeed(run.store)
    assert feed.log(-1)["text"] == ""
    log = run.folder / "worker.log"
    log.write_bytes(b"one\ntwo\nthr")
    first = feed.log(-1)
    assert (first["text"], first["offset"]) == ("one\ntwo\n", 8)
    log.write_bytes(b"one\ntwo\nthree\n")
    assert feed.log(8) == {"offset": 14, "restart": False, "text": "three\n"}
    assert feed.log(14)["text"] == ""
    log.write_bytes(b"new\n")
    assert feed.log(14) == {"offset": 4, "restart": True, "text": "new\n"}


def test_a_huge_log_is_never_read_whole(run):
    (run.folder / "worker.log").write_bytes(b"x" * 50 + b"\n" + b"line\n" * LOG_BYTES)
    reply = RunFeed(run.store).log(0)
    assert reply["restart"]
    assert len(reply["text"]) <= LOG_BYTES
    assert set(reply["text"].splitlines()) == {"line"}


def test_bytes_that_are_no_text_and_endless_lines_do_no_harm(run):
    (run.folder / "worker.log").write_bytes(b"\xff\xfe\n" + b"y" * (LOG_BYTES * 2))
    feed = RunFeed(run.store)
    offset = feed.log(-1)["offset"]
    assert offset > LOG_BYTES


def test_the_live_run_comes_first(tmp_path):
    feeds = Feeds(tmp_path)
    assert feeds.newest() == ""
    live = FakeRun(tmp_path, "first").start()
    ended = FakeRun(tmp_path, "second")
    assert feeds.newest() == live.run_id
    live.state(RunState.STOPPED)
    assert feeds.newest() in (live.run_id, ended.run_id)
    with pytest.raises(RunError):
        feeds.of("../second")


def test_a_damaged_run_is_said_to_be_so(run):
    feed = RunFeed(run.store)
    (run.folder / "run.sqlite").unlink()
    assert feed.rows().status.state is RunState.DAMAGED


def test_a_folder_that_was_replaced_is_another_run(tmp_path):
    feeds = Feeds(tmp_path)
    first = FakeRun(tmp_path)
    feed = feeds.of(first.run_id)
    assert feeds.of(first.run_id) is feed
    first.folder.rename(tmp_path / "kept")
    shutil.copytree(tmp_path / "kept", first.folder)
    assert feeds.of(first.run_id) is not feed
