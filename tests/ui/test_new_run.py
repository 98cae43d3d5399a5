"""What the New run page says about a configuration, without a browser: plan, problems, what is missing, escaping."""

import threading
from dataclasses import replace
from html import unescape

import pytest

from megatrain.config import RunConfig
from megatrain.errors import DataError, ModelError
from megatrain.units import GIB
from tests.shapes import QWEN_7B, SMALL, machine
from ui import form, plan_view, planning, presets, review_view
from ui.background import Background
from ui.glance import glance
from ui.pages.new_run import ADVANCED, PLACED, SECTIONS, checked_client_id
from ui.planning import Model, Planning

NASTY = "<b>x</b> ${1} {{2}} `\"'"


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """outlook(shape or error, machine, **changes): what the page knows when the model has been read."""

    def outlook(found, computer=None, **changes):
        def read(self, config):
            if isinstance(found, Exception):
                raise found
            return Model(found, chat_template=False)

        monkeypatch.setattr(Planning, "_read_model", read)
        monkeypatch.setattr(planning, "read_machine", lambda workspace: computer or machine())
        monkeypatch.setattr(planning, "BACKGROUND", Background())
        asked = Planning(tmp_path)
        raw = presets.apply("demo", form.values(RunConfig()))
        for key, value in changes.items():
            at = form.KEYS.index(key.replace("__", "."))
            raw[at] = value
        result = asked.outlook(raw)
        waiting = threading.Event()
        while result.pending:
            waiting.wait(0.02)
            result = asked.outlook(raw)
        return result

    return outlook


def test_every_option_has_one_place():
    assert len(PLACED) == len(set(PLACED))
    assert set(PLACED) | set(ADVANCED) == set(form.KEYS)
    assert {key.rpartition(".")[0] for key in ADVANCED} <= {"", *SECTIONS}


def test_what_fits_shows_bars_speed_and_no_suggestion(planned):
    outlook = planned(SMALL)
    assert outlook.missing == ""
    html = plan_view.panel(outlook)
    assert "Fits" in html
    assert "data-apply" not in html
    for words in ("RAM", "Disk", "tokens/s", "60 steps", "Weights", "Moments"):
        assert words in html
    for bar in plan_view.bars(outlook.fit.need, outlook):
        assert sum(bar.parts.values()) == bar.need


def test_what_does_not_fit_says_how_much_and_offers_changes(planned):
    outlook = planned(SMALL, memory__ram_limit_gib="0.3")
    assert "too much RAM" in outlook.missing
    html = unescape(plan_view.panel(outlook))
    assert outlook.missing in html
    assert outlook.suggestions
    for change in outlook.suggestions:
        changed = form.config(form.with_value(outlook.raw, change.key, change.value))
        assert planning.fit_of(changed, SMALL, outlook.machine).plan == change.plan
        assert change.text in html


def test_the_panel_and_the_planner_name_the_same_number(planned):
    outlook = planned(QWEN_7B, machine(ram_gib=16))
    excess = {bar.name: bar.excess for bar in plan_view.bars(outlook.fit.need, outlook)}
    assert excess["ram"] == outlook.fit.missing_bytes["ram"]


def test_a_card_has_a_vram_bar(planned):
    outlook = planned(QWEN_7B, machine(vram_gib=24, ram_gib=256))
    assert outlook.missing == ""
    assert [bar.name for bar in plan_view.bars(outlook.fit.need, outlook)] == ["vram", "ram", "disk"]
    assert "VRAM" in plan_view.places(outlook.fit.plan)


def test_problems_are_all_named(planned):
    outlook = planned(SMALL, train__seed="-1", train__learning_rate="")
    assert outlook.missing == "Correct 2 fields"
    html = plan_view.panel(outlook) + review_view.review(outlook)
    assert "Seed" in html
    assert "Learning rate" in html


@pytest.mark.parametrize(("key", "missing"), [("model__path", "Choose a model"), ("data__path", "Choose data")])
def test_what_is_missing(planned, key, missing):
    assert planned(SMALL, **{key: " "}).missing == missing


def test_a_model_that_cannot_be_used_is_explained_and_escaped(planned):
    outlook = planned(ModelError(f"There is no {NASTY}.", "Check the name."))
    html = review_view.facts(outlook) + plan_view.panel(outlook)
    assert "<b>" not in html
    assert NASTY in unescape(html)
    assert outlook.missing


def test_a_sequence_longer_than_the_model_knows(planned):
    outlook = planned(replace(SMALL, max_positions=128))
    assert outlook.fit.plan is None
    assert outlook.missing == "Not possible: see the plan"
    assert "data.sequence_length" in plan_view.panel(outlook)


def test_warnings(planned):
    outlook = planned(SMALL, machine(), model__path="owner/name", train__warmup_steps="100")
    found = " ".join(review_view.warnings(outlook))
    assert "0.001" in found
    assert "100" in found
    poor = replace(machine(), disk_free_bytes=GIB // 100)
    assert any("disk" in words for words in review_view.warnings(planned(SMALL, poor)))


def test_every_precision_is_in_the_table(planned):
    outlook = planned(SMALL)
    fits = [planning.fit_of(replace(outlook.config, precision=name), SMALL, outlook.machine) for name in ("fp32", "bf16")]
    html = plan_view.precisions(fits, "bf16")
    assert html.count("chosen") >= 1
    assert "fp32" in html
    assert "bf16" in html


def test_the_demo_starts_in_the_faster_precision():
    computer = machine()
    rates = computer.cpu_rates.compute_flops_per_s
    fast = form.config(presets.initial(computer)).precision
    assert (fast == "bf16") == (rates["bfloat16"] >= rates["float32"])


@pytest.mark.parametrize("value", [None, "", "x", "../../a", 7, "g" * 12, "a" * 65])
def test_a_client_id_that_is_none_counts_for_nothing(value):
    assert checked_client_id(value) == ""


def test_a_client_id():
    assert checked_client_id("0123456789abcdef01234567") == "0123456789abcdef01234567"


class TestGlance:
    def test_rows_as_they_are_read(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_text('{"instruction": "Say hi", "output": "hi"}\n{"instruction": "", "output": "x"}\n', "utf-8")
        found = glance(RunConfig.from_dict({"data": {"path": str(path)}}).data)
        assert found.format == "alpaca"
        assert found.rows[0] == (("user", "Say hi"), ("assistant", "hi"))
        assert found.rows[1][0][0] == "problem"
        assert 1 <= found.about_tokens <= 20

    def test_the_demo(self):
        found = glance(RunConfig().data)
        assert len(found.rows) == 5

    def test_nothing_there(self, tmp_path):
        with pytest.raises(DataError):
            glance(RunConfig.from_dict({"data": {"path": str(tmp_path / "missing.jsonl")}}).data)


class TestBackground:
    def test_one_question_is_worked_out_once(self):
        gate, calls = threading.Event(), []

        def work():
            calls.append(1)
            gate.wait()
            return 5

        background = Background()
        assert background.ask("q", work).pending
        assert background.ask("q", work).pending
        gate.set()
        while (answer := background.ask("q", work)).pending:
            pass
        assert answer.value == 5
        assert len(calls) == 1

    def test_a_failure_is_told_and_asked_again_when_forgotten(self):
        answers = iter([ModelError("no"), None])

        def work():
            error = next(answers)
            if error:
                raise error
            return "yes"

        background = Background()
        while (answer := background.ask("q", work)).pending:
            pass
        assert answer.error.message == "no"
        background.forget("q")
        while (answer := background.ask("q", work)).pending:
            pass
        assert answer.value == "yes"

    def test_only_the_newest_answers_stay(self):
        background = Background(keep=3)
        for number in range(10):
            while background.ask(number, lambda number=number: number + 1).pending:
                pass
        assert not background.knows(0)
        assert background.knows(9)


def test_an_offload_folder_that_cannot_be_is_named(planned, tmp_path):
    (tmp_path / "file").write_text("")
    outlook = planned(SMALL, memory__offload_folder=str(tmp_path / "file" / "inside"))
    assert "Offload folder" in outlook.missing
    assert "is a file" in unescape(plan_view.panel(outlook))


def test_states_on_disk_are_shown_with_their_room(planned, tmp_path):
    outlook = planned(SMALL, memory__offload_folder=str(tmp_path), memory__moments="nvme")
    assert outlook.missing == ""
    bar = next(bar for bar in plan_view.bars(outlook.fit.need, outlook) if bar.name == "disk")
    assert bar.parts["moments"] > 0
    assert "what RAM lacks lives on disk" in plan_view.panel(outlook)
