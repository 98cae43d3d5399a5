"""The New run page in a real browser: the plan follows the form, the draft survives, a start happens once."""

import json
import re

import pytest
from playwright.sync_api import Page, expect

from megatrain.config import RunConfig
from megatrain.runs.supervisor import list_runs
from tests.shapes import SMALL
from ui import draft, form, planning
from ui.background import Background
from ui.planning import Model
from ui.texts.en import TEXTS

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

PATIENCE = {"timeout": 60_000}
NASTY = "<img src=x onerror=window.hacked=1> ${window.hacked=2} {{value}} `"


@pytest.fixture(autouse=True)
def first_visit(monkeypatch, dashboard):
    """No draft, nothing asked yet, and for every model a small shape, as the inspecting process would report it."""
    (dashboard.workspace / draft.NAME).unlink(missing_ok=True)
    monkeypatch.setattr(planning, "BACKGROUND", Background())
    monkeypatch.setattr(planning.Planning, "_read_model", lambda self, config: Model(SMALL, chat_template=True))


@pytest.fixture
def started(monkeypatch):
    """Workers that were asked for; none is started."""
    asked: list[str] = []
    monkeypatch.setattr("ui.pages.new_run.start_worker", lambda store, **_: asked.append(store.run_id))
    return asked


def open_form(page: Page, dashboard, verdict: str = "Fits") -> None:
    page.goto(dashboard.link("new_run"))
    expect(page.locator("#plan-panel .plan-title")).to_contain_text(verdict, **PATIENCE)


def field(page: Page, key: str):
    return page.locator(f"#option-{key.replace('.', '-')} input")


def write(page: Page, key: str, value: str) -> None:
    field(page, key).fill(value)
    field(page, key).press("Tab")


def wait_for_draft(page: Page, dashboard, key: str, value: str) -> None:
    while (draft.load(dashboard.workspace) or form.values(RunConfig()))[form.KEYS.index(key)] != value:
        page.wait_for_timeout(100)


def test_a_newcomer_can_start_the_demo_at_once(page: Page, dashboard, started):
    open_form(page, dashboard)
    expect(field(page, "train.num_steps")).to_have_value("60")
    expect(page.get_by_role("radio", name=TEXTS["new_run"]["preset_demo"])).to_be_checked()
    expect(page.locator("#model-facts")).to_contain_text("Qwen2ForCausalLM")
    start = page.get_by_role("button", name=TEXTS["new_run"]["start"])
    expect(start).to_be_enabled()
    start.dblclick()
    expect(page.get_by_role("tab", name=TEXTS["shell"]["page_monitor"])).to_have_attribute("aria-selected", "true", **PATIENCE)
    page.wait_for_timeout(1000)
    runs = list_runs(dashboard.workspace)
    assert len(runs) == 1
    assert set(started) == {runs[0].run_id}
    assert RunConfig.load(runs[0].folder / "config.yaml").train.num_steps == 60


def test_the_plan_follows_the_form_and_start_says_what_is_missing(page: Page, dashboard):
    open_form(page, dashboard)
    start = page.locator("#start")
    write(page, "train.global_batch_tokens", "1000")
    expect(start).to_have_text("Correct: Global batch", **PATIENCE)
    expect(start).to_be_disabled()
    expect(page.locator("#review")).to_contain_text("the nearest is 1024")
    write(page, "train.global_batch_tokens", "4,096")
    expect(start).to_be_enabled(**PATIENCE)
    write(page, "memory.ram_limit_gib", "0.2")
    expect(start).to_have_text(re.compile("Does not fit: .* too much RAM"), **PATIENCE)
    expect(start).to_be_disabled()
    fix = page.locator("#plan-panel").get_by_role("button", name=re.compile("RAM limit"))
    fix.click()
    expect(page.locator("#plan-panel .plan-title")).to_have_text("Fits", **PATIENCE)
    expect(field(page, "memory.ram_limit_gib")).not_to_have_value("0.2")


def test_a_reload_keeps_the_form_and_empty_fields_stay_empty(page: Page, dashboard):
    open_form(page, dashboard)
    page.get_by_role("radio", name=TEXTS["new_run"]["preset_facts"]).check()
    expect(field(page, "train.num_epochs")).to_have_value("4", **PATIENCE)
    write(page, "name", NASTY)
    expect(page.locator("#plan-panel .plan-title")).to_contain_text("Fits", **PATIENCE)
    wait_for_draft(page, dashboard, "name", NASTY)
    page.reload()
    expect(field(page, "name")).to_have_value(NASTY, **PATIENCE)
    expect(field(page, "train.num_epochs")).to_have_value("4")
    expect(field(page, "train.num_steps")).to_have_value("")
    page.get_by_role("button", name=TEXTS["new_run"]["advanced"]).click()
    expect(field(page, "memory.disk_limit_gib")).to_have_value("")
    expect(page.locator("#start")).to_be_enabled(**PATIENCE)
    assert page.evaluate("window.hacked") is None


def test_rows_are_shown_as_text(page: Page, dashboard, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": NASTY, "completion": "</p><script>window.hacked = 3</script>"}) + "\n", "utf-8")
    draft.save_config(dashboard.workspace, RunConfig.from_dict({"data": {"path": str(data), "sequence_length": 256}}))
    open_form(page, dashboard)
    page.get_by_role("button", name=TEXTS["new_run"]["look"]).click()
    rows = page.locator("#data-rows")
    expect(rows).to_contain_text(NASTY, **PATIENCE)
    expect(rows).to_contain_text("<script>window.hacked = 3</script>")
    expect(rows.locator("img, script")).to_have_count(0)
    assert page.evaluate("window.hacked") is None


def test_data_that_cannot_be_read_is_explained(page: Page, dashboard, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"a": 1, "b": 2}\n', "utf-8")
    draft.save_config(dashboard.workspace, RunConfig.from_dict({"data": {"path": str(data)}}))
    open_form(page, dashboard)
    expect(page.locator("#data-facts")).to_contain_text("No known format", **PATIENCE)
    expect(page.locator("#start")).to_have_text(TEXTS["new_run"]["missing_data_error"], **PATIENCE)


def test_a_file_fills_the_form_or_lists_every_problem(page: Page, dashboard, tmp_path):
    open_form(page, dashboard)
    page.get_by_role("button", name=TEXTS["new_run"]["as_file"]).click()
    expect(page.locator("#yaml")).to_contain_text("learning_rate: 0.001", **PATIENCE)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("train: {seed: -1, speed: 3}\nprecision: int3\n")
    page.locator("input[type=file]").set_input_files(wrong)
    note = page.locator("#yaml-note")
    for key in ("train.seed", "train.speed", "precision"):
        expect(note).to_contain_text(key, **PATIENCE)
    expect(field(page, "train.num_steps")).to_have_value("60")
    right = tmp_path / "right.yaml"
    right.write_text("name: from a file\ntrain: {seed: 7, num_steps: 5}\n")
    page.locator("input[type=file]").set_input_files(right)
    expect(field(page, "name")).to_have_value("from a file", **PATIENCE)
    expect(field(page, "train.num_steps")).to_have_value("5")
    expect(note).to_contain_text(TEXTS["new_run"]["loaded"])


def test_another_model_leaves_the_rates_of_the_demo(page: Page, dashboard):
    open_form(page, dashboard)
    field(page, "model.path").fill("https://huggingface.co/owner/small/tree/main")
    field(page, "model.path").press("Enter")
    expect(field(page, "model.path")).to_have_value("owner/small", **PATIENCE)
    expect(field(page, "train.learning_rate")).to_have_value("1e-5", **PATIENCE)


def test_a_phone_has_no_sideways_scroll_and_the_plan_in_a_bar(page: Page, dashboard):
    page.set_viewport_size({"width": 390, "height": 844})
    open_form(page, dashboard)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    panel = page.locator("#plan-panel")
    expect(panel.locator(".plan-body")).to_be_hidden()
    panel.get_by_role("button", name="Fits").click()
    expect(panel.locator(".plan-body")).to_be_visible()
    assert panel.bounding_box()["x"] == 0


def test_every_field_has_a_name(page: Page, dashboard):
    open_form(page, dashboard)
    page.get_by_role("button", name=TEXTS["new_run"]["advanced"]).click()
    expect(field(page, "train.beta2")).to_be_visible()
    nameless = page.evaluate("""() => [...document.querySelectorAll('#page-new_run input:not([type=file])')]
        .filter(input => !input.getAttribute('aria-label') && !input.closest('label') && input.offsetParent)
        .map(input => input.outerHTML)""")
    assert nameless == []
