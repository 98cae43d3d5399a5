"""Every text that is asked for exists, and the scripts hold no words of their own."""

import re
from pathlib import Path

import pytest

from megatrain.runs.records import COMMANDS, RunState
from ui import fixes
from ui.texts import en_data, ko_data
from ui.texts.en import TEXTS
from ui.words import text

UI = Path(__file__).parents[2] / "ui"
ASKED = re.compile(r"""\btext\(\s*["']([a-z_]+\.[a-z0-9_]+[a-z0-9])["']""")


def test_every_text_that_is_asked_for_exists():
    asked = {key for path in UI.rglob("*.py") for key in ASKED.findall(path.read_text("utf-8"))}
    assert len(asked) > 50
    missing = [key for key in asked if key.partition(".")[2] not in TEXTS.get(key.partition(".")[0], {})]
    assert not missing


def test_every_state_and_every_action_has_a_word():
    assert {str(state) for state in RunState} <= TEXTS["states"].keys()
    actions = {*COMMANDS, *fixes.CHANGES, "resume", "start", "force_quit"}
    assert {f"do_{action}" for action in actions} <= TEXTS["monitor"].keys()
    assert {f"pending_{command}" for command in COMMANDS} <= TEXTS["monitor"].keys()


def test_texts_that_the_monitors_scripts_use_exist():
    known = TEXTS["monitor"].keys() | TEXTS["charts"].keys() | TEXTS["shell"].keys()
    for name in ("shared", "strip", "head", "charts", "events", "log"):
        used = set(re.findall(r"\btexts\.([a-z0-9_]+)", (UI / "static" / f"{name}.js").read_text("utf-8")))
        assert used <= known, name


def test_texts_that_the_data_pages_scripts_use_exist():
    for name in ("data", "figures", "saved"):
        script = (UI / "static" / f"{name}.js").read_text("utf-8")
        assert set(re.findall(r"\btexts\.([a-z0-9_]+)", script)) <= TEXTS["data"].keys(), name
    asked = {f"tile_{name}" for name in ("rows", "held_out", "tokens", "trained", "packing", "steps")}
    asked |= {f"fate_{name}" for name in ("cut", "split", "empty", "duplicates", "overlap", "escaped", "dropped")}
    assert asked <= TEXTS["data"].keys()


def test_both_languages_have_the_same_texts_with_the_same_gaps():
    english, korean = en_data.DATA, ko_data.DATA
    assert english.keys() == korean.keys()
    gaps = re.compile(r"%?\{[^}]*\}|<[^>]*>")
    assert {key: sorted(gaps.findall(words)) for key, words in english.items()} == {
        key: sorted(gaps.findall(words)) for key, words in korean.items()}  # fmt: skip
    assert all(re.search("[\uac00-\ud7a3]|/", words) for words in korean.values())


def test_an_unknown_text_is_an_error():
    with pytest.raises(KeyError):
        text("monitor.no_such_text")
    assert text("shell.step_of", step="1", total="2") == "step 1 of 2"
