"""The open look: a file says what is open, jobs say how far it is; cancelling, sleeping, dying and restarting."""

import threading
import time

import pytest

from megatrain.config import RunConfig
from megatrain.data.preview import Preview
from megatrain.data.report import NothingTrainedError
from megatrain.errors import DataError
from tests.data import tiny
from tests.ui.fake_preview import fake
from ui import form, looks
from ui.looks import Looks, Wish, read_wish, write_wish

CONFIG = RunConfig.from_dict({"data": {"path": "chats.jsonl"}})


def until(condition) -> None:
    for _ in range(2_000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never came")


@pytest.fixture
def preview(monkeypatch):
    """The class of the processes; none is real."""
    made = fake()
    monkeypatch.setattr(looks, "Preview", made)
    return made


@pytest.fixture
def opened(preview, tmp_path):
    """Looks over one workspace, closed afterwards."""
    found = Looks()
    yield found
    preview.held = ""
    found.close(tmp_path)


def counted(opened, workspace):
    until(lambda: (opened.current(workspace).counting or looks.Job()).stage != "running")
    return opened.current(workspace)


def test_opening_shows_rows_and_then_figures(opened, preview, tmp_path):
    assert opened.current(tmp_path) is None
    opened.open(tmp_path, CONFIG)
    look = counted(opened, tmp_path)
    assert (look.opening.stage, look.counting.stage) == ("done", "done")
    assert look.counting.value["rows_read"] == 100
    assert look.row(7).value["rows"][0]["row"] == 7
    assert look.tokens(7).value["tokens"] == 1
    assert look.search("x", 1).value["rows"][0]["row"] == 7
    assert [process.is_alive for process in preview.opened] == [True, False]


def test_a_restarted_dashboard_opens_the_same(opened, preview, tmp_path):
    opened.open(tmp_path, CONFIG)
    look = counted(opened, tmp_path)
    again = Looks()
    assert again.current(tmp_path).id == look.id
    assert again.current(tmp_path).config == CONFIG
    again.close(tmp_path)
    assert again.current(tmp_path) is None
    assert opened.current(tmp_path) is None


def test_what_is_cancelled_stays_cancelled_until_somebody_counts(opened, preview, tmp_path):
    opened.open(tmp_path, CONFIG)
    until(lambda: opened.current(tmp_path).opening.stage == "done")
    preview.held = "counting"
    opened.count(tmp_path)
    until(lambda: opened.current(tmp_path).counting is not None)
    opened.cancel(tmp_path)
    look = opened.current(tmp_path)
    assert look.counting.stage == "stopped"
    assert look.row(1).value["rows"]
    preview.held = ""
    restarted = Looks()
    until(lambda: restarted.current(tmp_path).opening.stage == "done")
    assert restarted.current(tmp_path).counting.stage == "stopped"
    restarted.count(tmp_path)
    assert counted(restarted, tmp_path).counting.stage == "done"
    restarted.close(tmp_path)


def test_opening_can_be_cancelled(opened, preview, tmp_path):
    preview.held = "opening"
    opened.open(tmp_path, CONFIG)
    until(lambda: preview.opened)
    opened.cancel(tmp_path)
    look = opened.current(tmp_path)
    assert look.opening.stage == "stopped"
    until(lambda: not preview.opened[0].is_alive)
    assert look.row(1).pending
    assert opened.current(tmp_path).opening.stage == "stopped"


def test_a_failure_is_kept_with_its_hint(opened, preview, tmp_path):
    preview.fault = DataError("There is no file.", "Give a path.")
    opened.open(tmp_path, CONFIG)
    until(lambda: opened.current(tmp_path).opening.stage == "failed")
    assert opened.current(tmp_path).opening.error.hint == "Give a path."
    preview.fault = None
    opened.open(tmp_path, CONFIG)
    assert counted(opened, tmp_path).opening.stage == "done"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_ours_is_no_endless_wait(opened, preview, tmp_path):
    preview.fault = RuntimeError("oops")
    opened.open(tmp_path, CONFIG)
    until(lambda: opened.current(tmp_path).opening.stage == "failed")
    assert opened.current(tmp_path).opening.error.hint
    until(lambda: not any(thread.name == "look" for thread in threading.enumerate()))  # its report is this test's


def test_data_that_trains_nothing(opened, preview, tmp_path):
    preview.nothing_trained = True
    opened.open(tmp_path, CONFIG)
    look = counted(opened, tmp_path)
    assert isinstance(look.counting.error, NothingTrainedError)
    assert look.row(1).value["rows"]


def test_without_a_model_there_are_rows_only(opened, preview, tmp_path):
    opened.open(tmp_path, RunConfig.from_dict({"model": {"path": ""}, "data": {"path": "x"}}))
    until(lambda: opened.current(tmp_path).opening.stage == "done")
    assert opened.current(tmp_path).counting is None
    assert preview.opened[0].folder is None


def test_a_process_that_died_is_started_again(opened, preview, tmp_path):
    opened.open(tmp_path, CONFIG)
    look = counted(opened, tmp_path)
    preview.opened[0].is_alive = False
    assert opened.current(tmp_path) is look
    until(lambda: opened.current(tmp_path).opening.stage == "done" and len(preview.opened) == 3)
    assert look.row(3).value["rows"][0]["row"] == 3
    assert look.counting.stage == "done"


def test_nobody_looks_and_the_process_sleeps(opened, preview, tmp_path, monkeypatch):
    monkeypatch.setattr(looks, "IDLE_S", 0.05)
    opened.open(tmp_path, CONFIG)
    look = counted(opened, tmp_path)
    until(lambda: not any(process.is_alive for process in preview.opened))
    assert look.counting.stage == "done"
    monkeypatch.setattr(looks, "IDLE_S", 600.0)
    opened.current(tmp_path)
    until(lambda: opened.current(tmp_path).row(1).value)


def test_another_look_ends_the_processes_of_the_one_before(opened, preview, tmp_path):
    opened.open(tmp_path, CONFIG)
    counted(opened, tmp_path)
    opened.open(tmp_path, RunConfig.from_dict({"data": {"path": "other.jsonl"}}))
    assert not preview.opened[0].is_alive
    assert counted(opened, tmp_path).config.data.path == "other.jsonl"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"config": {"speed": 3}, "counts": true}', '{"config": 5, "counts": true}', "null"])
def test_a_damaged_file_opens_nothing(tmp_path, content):
    (tmp_path / looks.NAME).write_text(content)
    assert read_wish(tmp_path) is None
    write_wish(tmp_path, Wish(CONFIG, counts=False))
    assert read_wish(tmp_path) == Wish(CONFIG, counts=False)


def test_the_form_is_kept_and_only_what_matters_is_opened(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(looks.LOOKS, "open", lambda workspace, config: asked.append(config))
    raw = form.with_value(form.values(RunConfig()), "data.sequence_length", 512)
    raw = form.with_value(raw, "train.learning_rate", "nonsense")
    assert looks.open_look(tmp_path, raw) == []
    assert asked[0].data.sequence_length == 512
    assert asked[0].train.learning_rate == RunConfig().train.learning_rate
    assert looks.load_form(tmp_path)[form.KEYS.index("data.sequence_length")] == "512"
    wrong = form.with_value(raw, "data.sequence_length", 1000)
    assert [key for key, _ in looks.open_look(tmp_path, wrong)] == ["train.global_batch_tokens"]
    assert looks.open_look(tmp_path, form.with_value(raw, "data.path", ""))[0][0] == "data.path"
    assert len(asked) == 1


def test_a_workspace_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    ((key, words),) = looks.open_look(tmp_path / "file", form.values(RunConfig()))
    assert key == looks.NAME
    assert "cannot be written" in words


def test_a_folder_with_a_tokenizer_alone_is_enough(tmp_path):
    tiny.saved(tmp_path / "tokenizer", tiny.CHATML)
    (tmp_path / "tokenizer" / "config.json").unlink(missing_ok=True)
    config = RunConfig.from_dict({"model": {"path": str(tmp_path / "tokenizer")}})
    assert looks.tokenizer_folder(config, lambda phase: None, lambda: False) == tmp_path / "tokenizer"


def test_the_real_process_ends_at_once_when_opening_is_cancelled(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n')
    stop = threading.Event()
    stop.set()
    with pytest.raises(DataError, match="was stopped"):
        Preview(RunConfig.from_dict({"data": {"path": str(tmp_path / "rows.jsonl")}}), None, tmp_path, stop.is_set)


def test_the_real_process_says_that_nothing_is_trained(tmp_path):
    tiny.saved(tmp_path / "model", tiny.CHATML)
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "q"}]}\n')
    with Preview(RunConfig.from_dict({"data": {"path": str(tmp_path / "rows.jsonl")}}), tmp_path / "model", tmp_path) as made:
        with pytest.raises(NothingTrainedError, match="None of the 1 rows"):
            made.statistics()
        assert "no turn" in made.rows(0, 1)["rows"][0]["problem"]
