"""What the Data page's server functions answer, whatever they are asked, and what its handlers do to forms and named data sets."""

import json

import pytest

from megatrain.config import RunConfig
from megatrain.data import recipes
from megatrain.errors import DataError
from tests.ui.fake_preview import fake
from tests.ui.test_looks import counted
from ui import draft, form, looks
from ui.data_fields import LOOK_KEYS
from ui.looks import LOOKS
from ui.pages import data as page

NONSENSE = [None, 3, "x", [], {}, {"number": 0}, {"number": True}, {"number": "1"}, {"number": 10**12}, {"words": 5, "start": 1},
            {"words": "", "start": 1}, {"words": "x" * 501, "start": 1}, {"words": "x", "start": -1}]  # fmt: skip


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """opened(**data): the workspace with a file of the user open in it."""
    preview = fake()
    monkeypatch.setattr(looks, "Preview", preview)

    def look(**changes):
        path = tmp_path / "chats <b>.jsonl"
        path.write_text('{"text": "x"}\n')
        LOOKS.open(tmp_path, RunConfig.from_dict({"data": {"path": str(path), **changes}}))
        counted(LOOKS, tmp_path)
        return tmp_path

    look.preview = preview
    yield look
    preview.held = ""
    LOOKS.close(tmp_path)


def asked(workspace, name, **request):
    function = getattr(page.row_browser(workspace), name)
    return function({"id": LOOKS.current(workspace).id, **request})


def at(raw, key):
    return raw[form.KEYS.index(key)]


def test_a_look_in_one_reply(opened):
    reply = asked(opened(), "look")
    assert (reply["stage"], reply["total"], reply["tokens"]) == ("done", 100, True)
    assert reply["sources"][0]["format"] == "Messages (role, content)"
    assert reply["counting"]["figures"]["tiles"]
    assert len(json.dumps(reply)) < 20_000
    assert page.look_reply(None)["stage"] == "none"


def test_nothing_trained_is_told_apart(opened):
    opened.preview.nothing_trained = True
    reply = asked(opened(), "look")
    assert reply["counting"]["nothing_trained"]
    assert "figures" not in reply["counting"]


def test_rows_tokens_and_hits(opened):
    workspace = opened()
    row = asked(workspace, "row", number=100)
    assert (row["row"], row["more"], row["turns"][0]["text"]) == (100, False, "hello")
    assert asked(workspace, "row", number=5, tokens=True)["documents"] == [[["hello", "t", 5]]]
    assert asked(workspace, "search", words=" needle ", start=1)["hits"][0]["around"][1] == "needle"
    behind = asked(workspace, "row", number=101)
    assert "no row 101" in behind["error"]
    assert behind["hint"]


@pytest.mark.parametrize("request_", NONSENSE)
def test_nonsense_is_answered_in_words(opened, request_):
    workspace = opened()
    browser = page.row_browser(workspace)
    assert browser.row(request_) == browser.search(request_) == {"again": True}
    if isinstance(request_, dict):
        request_ = {"id": LOOKS.current(workspace).id, **request_}
        assert browser.row(request_).keys() == browser.search(request_).keys() == {"error", "hint"}
    assert "error" in browser.act(request_)
    saved = page.saved_sets(workspace)
    assert "error" in saved.save(request_)
    assert "error" in saved.delete(request_)
    assert browser.look(request_)["stage"] == "done"


def test_a_request_for_another_look_is_asked_again(opened):
    assert page.row_browser(opened()).row({"id": "0123", "number": 1}) == {"again": True}


def test_buttons(opened):
    workspace = opened()
    assert asked(workspace, "act", action="cancel") == {}
    opened.preview.held = "counting"
    assert asked(workspace, "act", action="count") == {}
    assert asked(workspace, "look")["counting"]["stage"] == "running"
    assert asked(workspace, "act", action="cancel") == {}
    assert asked(workspace, "look")["counting"]["stage"] == "stopped"
    assert asked(workspace, "act", action="close") == {}
    assert page.row_browser(workspace).look({})["stage"] == "none"


class TestNamedSets:
    def test_what_is_open_is_saved_with_the_way_it_is_read(self, opened):
        workspace = opened(format="text", max_rows=5, train_on="everything", sequence_length=2048)
        saved = page.saved_sets(workspace)
        assert "Saved as mine" in saved.save({"name": " mine "})["said"]
        recipe = recipes.load(recipes.find("mine", workspace))
        assert recipe.sources == [{"path": str(workspace / "chats <b>.jsonl"), "format": "text", "max_rows": 5}]
        assert recipe.settings == {"train_on": "everything"}
        assert "replaced" in saved.save({"name": "mine"})["said"]
        assert saved.saved({}) == {"saved": [{"name": "mine", "words": "chats <b>.jsonl", "damaged": False}]}

    def test_a_mixture_is_saved_whole(self, opened):
        workspace = opened()
        (workspace / "a.txt").write_text("words")
        (workspace / "mix.yaml").write_text("sources: [{path: a.txt, weight: 2}, {path: owner/name}]\nsettings: {long_rows: split}\n")
        LOOKS.open(workspace, RunConfig.from_dict({"data": {"path": str(workspace / "mix.yaml"), "bad_lines": "skip"}}))
        page.save_reply(workspace, "copy")
        recipe = recipes.load(recipes.find("copy", workspace))
        assert recipe.sources == [{"path": str(workspace / "a.txt"), "weight": 2}, {"path": "owner/name"}]
        assert recipe.settings == {"long_rows": "split", "bad_lines": "skip"}
        assert page.described("copy", workspace)["words"] == "a.txt × 2, name"

    @pytest.mark.parametrize("name", ["", "demo", "../up", "a b", "x" * 41, "<b>", None, 5.5])
    def test_names_that_cannot_be(self, opened, name):
        assert page.saved_sets(opened()).save({"name": name})["error"]

    def test_nothing_is_saved_while_nothing_is_open(self, tmp_path):
        with pytest.raises(DataError, match="No data is open"):
            page.save_reply(tmp_path, "mine")

    def test_a_damaged_set_is_listed_with_the_reason_and_can_be_deleted(self, tmp_path):
        recipes.folder_of(tmp_path).mkdir()
        (recipes.folder_of(tmp_path) / "bad.yaml").write_text("sources: 5")
        saved = page.saved_sets(tmp_path)
        assert saved.saved({})["saved"][0]["damaged"]
        assert saved.delete({"name": "bad"}) == {}
        assert saved.saved({}) == {"saved": []}

    def test_choosing_one_leaves_the_way_it_is_read_to_it(self):
        data = {"format": "text", "train_on": "everything", "sequence_length": 2048, "max_rows": 9}
        raw = form.values(RunConfig.from_dict({"data": data}))
        chosen = page.named(raw, "mine")
        assert (at(chosen, "data.path"), at(chosen, "data.format"), at(chosen, "data.train_on")) == ("mine", "auto", "assistant")
        assert (at(chosen, "data.sequence_length"), at(chosen, "data.max_rows")) == ("2048", "9")
        assert at(page.named(raw, ["x"]), "data.path") == "demo"


def test_the_page_shows_everything_that_a_look_depends_on():
    assert set(page.SHOWN) | set(page.MORE) == set(LOOK_KEYS)
    assert {key for key in form.KEYS if key.startswith("data.")} < set(LOOK_KEYS)


def test_part_of_the_form_and_the_whole():
    part = form.Form(LOOK_KEYS, "look")
    raw = form.values(RunConfig.from_dict({"data": {"path": "x"}, "train": {"learning_rate": 0.5}}))
    own = part.of(raw)
    assert len(own) == len(LOOK_KEYS)
    assert part.spread(own, form.values(RunConfig())) != raw
    assert part.spread(own, raw) == raw


def test_two_drafts_do_not_meet(tmp_path):
    raw = form.with_value(form.values(RunConfig()), "data.path", "here")
    looks.save_form(tmp_path, raw)
    assert draft.load(tmp_path) is None
    assert at(looks.load_form(tmp_path), "data.path") == "here"
