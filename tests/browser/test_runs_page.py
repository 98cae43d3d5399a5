"""The Runs page in a real browser: the list, its filters, the detail of a run, and what its buttons do."""

import pytest
from playwright.sync_api import Page, expect

from megatrain.runs.records import RunState
from megatrain.runs.supervisor import list_runs
from ui.texts.en import TEXTS

pytestmark = pytest.mark.browser

PATIENCE = {"timeout": 60_000}
NASTY = "<img src=x onerror=window.hacked=1> ${window.hacked=2} {{value}} `"
WORDS = TEXTS["runs"]


def ended(dashboard, name: str, state: RunState = RunState.STOPPED):
    run = dashboard.run(name).start(60).train(60)
    run.checkpoint_folder(60)
    run.state(state)
    return run


def line(page: Page, run):
    return page.locator(f"tr[data-run='{run.run_id}']")


def open_list(page: Page, dashboard, run) -> None:
    page.goto(dashboard.link("runs"))
    expect(line(page, run)).to_be_visible(**PATIENCE)


def test_find_a_run_look_at_it_and_delete_it(page: Page, dashboard):
    first, second = ended(dashboard, NASTY), ended(dashboard, "second", RunState.FINISHED)
    (dashboard.workspace / "runs" / "no-record").mkdir()
    open_list(page, dashboard, first)
    expect(line(page, first)).to_contain_text(NASTY)
    expect(page.locator("tr[data-run='no-record']")).to_contain_text("run.sqlite is missing")
    page.get_by_role("combobox", name=WORDS["filter_state"]).select_option("finished")
    expect(line(page, first)).to_have_count(0)
    page.get_by_role("combobox", name=WORDS["filter_state"]).select_option("")
    page.get_by_role("searchbox", name=WORDS["search"]).fill("onerror")
    expect(line(page, second)).to_have_count(0)

    line(page, first).get_by_role("button").click()
    detail = page.locator(".run-detail")
    expect(detail).to_contain_text("global_batch_tokens", **PATIENCE)
    expect(detail.get_by_role("radio", name="Step 60")).to_be_checked()
    expect(detail.get_by_role("button", name="Resume from step 60")).to_be_enabled()
    expect(detail).to_contain_text("Goes on from step 60")
    page.reload()
    expect(detail).to_contain_text("global_batch_tokens", **PATIENCE)

    detail.get_by_role("button", name=WORDS["do_delete"]).click()
    expect(page.get_by_role("dialog")).to_contain_text("This frees")
    page.get_by_role("dialog").get_by_role("button", name=TEXTS["monitor"]["cancel"]).click()
    expect(line(page, first)).to_have_count(1)
    detail.get_by_role("button", name=WORDS["do_delete"]).click()
    page.get_by_role("dialog").get_by_role("button", name=WORDS["do_delete"]).click()
    expect(line(page, first)).to_have_count(0, **PATIENCE)
    assert first.run_id not in {store.run_id for store in list_runs(dashboard.workspace)}
    assert page.evaluate("window.hacked") is None


def test_the_newest_checkpoint_is_chosen_until_somebody_chooses(page: Page, dashboard):
    run = ended(dashboard, "first")
    open_list(page, dashboard, run)
    line(page, run).get_by_role("button").click()
    detail = page.locator(".run-detail")
    expect(detail.get_by_role("radio", name="Step 60")).to_be_checked(**PATIENCE)
    run.checkpoint_folder(70)
    expect(detail.get_by_role("radio", name="Step 70")).to_be_checked(**PATIENCE)
    detail.get_by_role("radio", name="Step 60").check()
    run.checkpoint_folder(80)
    expect(detail.get_by_role("radio", name="Step 80")).to_be_visible(**PATIENCE)
    expect(detail.get_by_role("radio", name="Step 60")).to_be_checked()


def test_settings_are_duplicated_into_the_form(page: Page, dashboard):
    run = ended(dashboard, "first")
    open_list(page, dashboard, run)
    line(page, run).get_by_role("button").click()
    page.get_by_role("button", name=WORDS["do_duplicate"]).click()
    expect(page.get_by_role("tab", name=TEXTS["shell"]["page_new_run"])).to_have_attribute("aria-selected", "true", **PATIENCE)
    expect(page.locator("#option-data-path input")).to_have_value("support-chats.jsonl", **PATIENCE)
    expect(page.locator("#option-name input")).to_have_value("")


def test_a_crashed_run_is_explained_and_a_live_one_cannot_be_deleted(page: Page, dashboard):
    gone = dashboard.run("gone").start(60).train(60)
    gone.vanish()
    live = dashboard.run("live").start(60).train(60)
    page.set_viewport_size({"width": 390, "height": 844})
    open_list(page, dashboard, gone)
    line(page, gone).get_by_role("button").click()
    expect(page.locator(".run-detail .explanation")).to_be_visible(**PATIENCE)
    line(page, live).get_by_role("button").click()
    delete = page.locator(".run-detail").get_by_role("button", name=WORDS["do_delete"])
    expect(delete).to_have_attribute("title", WORDS["why_live"], **PATIENCE)
    expect(delete).to_have_attribute("aria-disabled", "true")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
