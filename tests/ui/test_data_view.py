"""What the Data page says of rows and figures; rows come from anybody, so whatever they hold is shown as harmless text."""

import json

import pytest

from megatrain.config import RunConfig
from tests.ui.fake_preview import described, report
from ui import data_view

CONFIG = RunConfig.from_dict({"data": {"sequence_length": 512}})
NASTY = "<script>alert(1)</script><b>x</b> ${1} {{2}} `\"'"


def token(text, trained=False, special=False):
    return {"text": text, "id": 1, "trained": trained, "special": special}


def seen(*documents, **changes):
    tokens = sum(map(len, documents))
    found = {"row": 1, "place": "x", "problem": "", "change": "", "documents": list(documents), "length": tokens, "tokens": tokens,
             "trained_tokens": 0, **changes}  # fmt: skip
    return data_view.tokens(found, whole=False)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("a\x00b\x1b[31m\x7f\x85", "a⟨U+0000⟩b⟨U+001B⟩[31m⟨U+007F⟩⟨U+0085⟩"),
        ("\u202eevil\u202c\u2066x\u2069", "⟨U+202E⟩evil⟨U+202C⟩⟨U+2066⟩x⟨U+2069⟩"),
        ("zero\u200bwidth\ufeff", "zero⟨U+200B⟩width⟨U+FEFF⟩"),
        ("\U000e0041tag", "⟨U+E0041⟩tag"),
        ("line\nend\ttab 👨\u200d👩\u200d👧 한국어 é", "line\nend\ttab 👨\u200d👩\u200d👧 한국어 é"),
        (NASTY, NASTY),
    ],
)
def test_what_nobody_would_see_is_shown_by_number(words, shown):
    assert data_view.visible(words) == shown


def test_every_control_character_of_a_row_is_visible():
    words = "".join(map(chr, range(0x20))) + "\x7f\u202e\u2028"
    row = described(1, words)
    row["turns"][1] |= {"reasoning": words, "calls": [{"name": words}], "role": words}
    row |= {"place": words, "source": words, "problem": words, "values": {words: words}}
    whole = json.dumps(data_view.row(row, whole=False), ensure_ascii=False)
    assert not any(code in whole for code in "\x00\x07\x1b\x7f\u202e\u2028")
    kept = json.loads(whole)
    assert kept["turns"][0]["text"].count("⟨U+") == 33
    assert kept["turns"][1]["name"].startswith("⟨U+0000⟩")


def test_a_row_is_a_conversation_with_roles_named():
    row = data_view.row(described(7), whole=False)
    assert [(turn["name"], turn["trained"]) for turn in row["turns"]] == [("User", False), ("Assistant", True)]
    assert (row["row"], row["place"], row["cut"]) == (7, "chats.jsonl line 7", False)
    assert json.loads(row["values"]) == {"messages": "hello"}


def test_very_long_rows_are_cut_until_somebody_asks():
    row = described(1, "a" * 50_000)
    row["turns"] *= 100
    short, whole = data_view.row(row, whole=False), data_view.row(row, whole=True)
    assert (short["cut"], whole["cut"]) == (True, False)
    assert len(short["turns"]) == data_view.ROW_TURNS
    assert len(json.dumps(short)) < 250_000
    assert short["num_turns"] == len(whole["turns"]) == 200
    assert len(whole["turns"][0]["text"]) == 50_000
    assert short["turns"][0]["length"] == "50,000"


def test_a_text_that_was_cut_before_says_so():
    assert data_view.row(described(1, "a" * data_view.WHOLE_CHARACTERS), whole=False)["turns"][0]["length"] == "100,000+"


def test_a_row_that_is_not_used_has_its_reason():
    row = data_view.row(described(3, NASTY, problem=f"the role `{NASTY}` is not known"), whole=False)
    assert row["turns"] == []
    assert NASTY in row["problem"]
    assert json.loads(row["values"])["messages"] == NASTY


def test_tokens_show_what_is_trained_and_what_controls():
    shown = seen([token("<|end|>", True, True), token("a\n\tb"), token("\x00", True), token("")])
    assert shown["documents"] == [[["<|end|>", "ts", 1], ["a↵\n⇥\tb", "", 1], ["⟨U+0000⟩", "t", 1], ["", "", 1]]]
    assert (shown["hidden"], shown["cut"]) == ("", False)


def test_a_million_tokens_do_not_reach_the_page_at_once():
    many = [token("x")] * (data_view.SHOWN_TOKENS - 5)
    shown = seen(many, [token("y")] * 8, [token("z")] * 9)
    assert sum(map(len, shown["documents"])) == data_view.SHOWN_TOKENS
    assert (shown["hidden"], shown["cut"], shown["num_documents"]) == ("12", True, 3)


@pytest.mark.parametrize(("words", "around"), [("HELLO", ["say ", "hello", " to"]), ("nowhere", ["say hello to", "", ""])])
def test_a_hit_shows_what_stands_around_it(words, around):
    row = described(4, "say hello to")
    row["turns"] = row["turns"][:1]
    assert data_view.hits({"rows": [row], "next": 9}, words) == {"hits": [{"row": 4, "around": around, "problem": False}], "next": 9}


@pytest.mark.parametrize("words", ["(", "[a-", "\\", ".*"])
def test_what_is_searched_for_is_no_pattern(words):
    row = described(4, f"before {words} behind")
    assert data_view.hits({"rows": [row], "next": 0}, words)["hits"][0]["around"][1] == words


def test_a_hit_in_a_row_that_cannot_be_read():
    assert data_view.hits({"rows": [described(4, "some words", problem="bad")], "next": 0}, "words")["hits"][0]["around"][1] == "words"


def test_figures_in_words():
    found = data_view.figures(report(), CONFIG)
    tiles = {tile["key"]: (tile["value"], tile["detail"]) for tile in found["tiles"]}
    assert tiles["rows"] == ("90", "of 100 read")
    assert tiles["trained"] == ("25.0 %", "5,000 tokens")
    assert tiles["packing"] == ("97.5 %", "80 packs")
    assert tiles["steps"] == ("5", "of 16,384 tokens each")
    assert found["warnings"] == []


def test_few_trained_tokens_are_a_warning():
    assert "1.0 %" in data_view.figures(report(trained_tokens=200), CONFIG)["warnings"][0]
    assert data_view.figures(report(trained_tokens=1_000), CONFIG)["warnings"] == []


def test_every_fate_has_its_count_and_examples():
    found = {fate["name"]: fate for fate in data_view.fates(report())}
    assert {name: fate["count"] for name, fate in found.items()} == {
        "Cut at the sequence length": "4", "Split into several": "0", "Left out: empty question, answer or text": "8",
        "The same as an earlier row": "1", "Held out and also trained on": "0", "Hold the words of a control token": "0",
        "Left out: the role `wizard` is not known": "2"}  # fmt: skip
    assert found["Left out: empty question, answer or text"]["examples"] == [{"row": 3, "text": "chats.jsonl line 3: {}"}]
    assert all(fate["linked"] for fate in found.values())


def test_rows_of_a_mixture_are_not_linked():
    source = {"name": "a", "weight": 1.0, "rows": 3, "tokens": 9, "packs": 1, "share": 0.5}
    found = data_view.figures(report(sources=[source, source]), CONFIG)
    assert not any(fate["linked"] for fate in found["fates"])
    assert found["sources"][0] == {"name": "a", "weight": "1", "rows": "3", "tokens": "9", "share": "50.0 %"}


def test_the_histogram_has_the_line_of_the_sequence_length():
    figure = data_view.histogram(report(), 512)
    (bars,), layout = figure["data"], figure["layout"]
    assert bars["y"] == [50, 30, 10]
    assert bars["customdata"] == ["92–128", "182–256", "1,449–2,048"]
    assert layout["shapes"][0]["x0"] == layout["shapes"][0]["x1"] == 18.0
    assert layout["xaxis"]["range"][0] < bars["x"][0] < 18 < bars["x"][2] < layout["xaxis"]["range"][1]
    assert "90 rows; 10 are longer" in figure["label"]
    json.dumps(figure)


def test_no_rows_no_histogram():
    assert data_view.histogram(report(length_histogram=[]), 512) is None


@pytest.mark.parametrize(
    ("done", "total", "unit", "words"),
    [(5_000, 20_000, "rows", "5,000 of 20,000 rows"), (5_000, 0, "rows", "5,000 rows"), (2**30, 2**31, "bytes", "1.00 GiB of 2.00 GiB")],
)
def test_progress(done, total, unit, words):
    assert data_view.progress(done, total, unit) == words
