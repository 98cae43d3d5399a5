"""The Data page in a real browser: open the demo, step, search, see what is trained, name it, use it; hostile rows; cancel."""

import json
import re

import pytest
from playwright.sync_api import Page, expect

from megatrain.config import RunConfig
from megatrain.data import recipes
from tests.shapes import SMALL
from tests.ui.fake_preview import fake
from ui import draft, form, looks, planning
from ui.background import Background
from ui.looks import LOOKS
from ui.planning import Model
from ui.texts.en import TEXTS

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

PATIENCE = {"timeout": 60_000}
WORDS = TEXTS["data"]
NASTY = "<img src=x onerror=window.hacked=1><script>window.hacked=2</script> ${window.hacked=3} {{value}} `"


@pytest.fixture
def closed(dashboard):
    """Nothing is open, before and afterwards."""
    yield dashboard
    LOOKS.close(dashboard.workspace)
    for name in recipes.names(dashboard.workspace):
        recipes.delete(name, dashboard.workspace)
    for name in (draft.NAME, looks.DRAFT):
        (dashboard.workspace / name).unlink(missing_ok=True)


@pytest.fixture
def demo(closed):
    """The demo's data is open, in real processes."""
    raw = form.values(RunConfig.from_dict({"data": {"sequence_length": 256, "max_rows": 200}}))
    assert looks.open_look(closed.workspace, raw) == []
    return closed


@pytest.fixture
def preview(monkeypatch):
    """Processes that answer at once, and hold when they are told to; none is real."""
    made = fake()
    monkeypatch.setattr(looks, "Preview", made)
    yield made
    made.held = ""


def number(page: Page):
    return page.get_by_role("spinbutton", name=WORDS["row_number"])


def test_rows_tokens_search_figures_and_a_reload(page: Page, demo):
    page.goto(demo.link("data"))
    expect(page.locator(".look-place")).to_be_visible(**PATIENCE)
    rows = page.locator("#row-browser")
    expect(rows.locator(".turn.prompt")).to_be_visible()
    expect(rows.locator(".turn.completion.trained")).to_contain_text("def ")
    page.get_by_role("button", name=WORDS["next"]).click()
    expect(rows.locator(".look-place")).to_contain_text("Row 2 ·", **PATIENCE)
    page.get_by_role("button", name=WORDS["previous"]).click()
    expect(rows.locator(".look-place")).to_contain_text("Row 1 ·", **PATIENCE)
    expect(page.get_by_role("button", name=WORDS["previous"])).to_be_disabled()
    number(page).fill("7")
    number(page).press("Enter")
    expect(rows.locator(".look-place")).to_contain_text("Row 7 ·", **PATIENCE)

    page.get_by_role("radio", name=WORDS["view_tokens"]).click()
    expect(rows.locator(".tokens .tok.special").first).to_be_visible(**PATIENCE)
    trained, plain = rows.locator(".tokens .tok.trained").last, rows.locator(".tokens .tok:not(.trained):not(.special)").first
    style = "node => [getComputedStyle(node).textDecorationLine, getComputedStyle(node).backgroundColor]"
    assert trained.evaluate(style)[0] == "underline"
    assert trained.evaluate(style)[1] != plain.evaluate(style)[1]
    assert plain.evaluate(style)[0] == "none"

    page.get_by_role("searchbox", name=WORDS["search"]).fill("RETURN")
    page.get_by_role("searchbox", name=WORDS["search"]).press("Enter")
    expect(rows.locator(".look-hits mark").first).to_have_text(re.compile("return", re.IGNORECASE), **PATIENCE)
    rows.locator(".look-hits li").nth(2).get_by_role("button").click()
    expect(rows.locator(".look-hits")).to_contain_text("Search on from row")
    chosen = rows.locator(".look-hits li").nth(2).get_by_role("button").inner_text()
    expect(rows.locator(".look-place")).to_contain_text(f"{chosen} ·", **PATIENCE)

    figures = page.locator("#figure-view")
    expect(figures.locator("[data-tile='rows']")).to_contain_text("of 200 read", **PATIENCE)
    expect(figures.locator(".plot .main-svg").first).to_be_visible(**PATIENCE)
    figures.locator("[data-fate='cut'] summary").click()
    example = figures.locator("[data-fate='cut'] .examples button").first
    wanted = example.inner_text()

    page.reload()
    expect(rows.locator(".look-place")).to_contain_text(f"{chosen} ·", **PATIENCE)
    expect(rows.locator(".tokens")).to_be_visible(**PATIENCE)
    expect(rows.locator(".look-hits mark").first).to_be_visible(**PATIENCE)
    expect(page.locator("#look-data-sequence_length input")).to_have_value("256")
    expect(figures.locator("[data-tile='rows']")).to_contain_text("of 200 read")
    figures.locator("[data-fate='cut'] summary").click()
    example.click()
    expect(rows.locator(".look-place")).to_contain_text(f"{wanted} ·", **PATIENCE)
    fits_a_phone(page)


def fits_a_phone(page: Page) -> None:
    """No scrolling sideways, fingers hit every button, every field has a name."""
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function("document.documentElement.scrollWidth <= 390")
    small = page.evaluate("""() => [...document.querySelectorAll('.look-widget .mt-button, .look-widget input')]
        .filter(node => node.offsetParent && node.getBoundingClientRect().height < 44).map(node => node.outerHTML)""")
    assert small == []
    nameless = page.evaluate("""() => [...document.querySelectorAll('#page-data input:not([type=file])')]
        .filter(input => input.offsetParent && !input.getAttribute('aria-label') && !input.closest('label') && !input.labels?.length)
        .map(input => input.outerHTML)""")
    assert nameless == []


def test_nothing_open_then_a_long_look_is_cancelled_and_begun_again(page: Page, closed, preview):
    page.goto(closed.link("runs"))
    expect(page.get_by_role("tab", name=TEXTS["shell"]["page_runs"])).to_have_attribute("aria-selected", "true", **PATIENCE)
    tab = page.get_by_role("tab", name=TEXTS["shell"]["page_data"])
    while tab.get_attribute("aria-selected") != "true":  # on a busy machine a second may lie between two keys
        page.keyboard.press("g")
        page.keyboard.press("d")
        page.wait_for_timeout(300)
    page.wait_for_url(re.compile("view=data"))
    expect(page.get_by_text(WORDS["nothing_title"])).to_be_visible(**PATIENCE)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_contain_text("g d")
    page.keyboard.press("Escape")
    length = page.locator("#look-data-sequence_length input")
    length.fill("1000")
    length.press("Tab")
    page.locator("#look-button").click()
    expect(page.locator("#look-note")).to_contain_text("the nearest is 16000", **PATIENCE)

    length.fill("256")
    length.press("Tab")
    preview.held = "opening"
    page.locator("#look-button").click()
    rows, figures = page.locator("#row-browser"), page.locator("#figure-view")
    expect(rows).to_contain_text(WORDS["opening"], **PATIENCE)
    rows.get_by_role("button", name=WORDS["cancel"]).click()
    expect(rows).to_contain_text(WORDS["stopped"], **PATIENCE)
    preview.held = ""
    rows.get_by_role("button", name=WORDS["again"]).click()
    expect(rows.locator(".look-place")).to_be_visible(**PATIENCE)
    expect(figures.locator("[data-tile='rows']")).to_contain_text("of 100 read", **PATIENCE)

    preview.held = "counting"
    page.evaluate("MegaTrain.say('megatrain:look-act', {action: 'count'})")
    expect(figures).to_contain_text("10 of 100 rows", **PATIENCE)
    figures.get_by_role("button", name=WORDS["cancel"]).click()
    expect(figures).to_contain_text(WORDS["counting_stopped"], **PATIENCE)
    page.reload()
    expect(figures).to_contain_text(WORDS["counting_stopped"], **PATIENCE)
    expect(rows.locator(".look-place")).to_be_visible(**PATIENCE)
    assert all(not process.is_alive for process in preview.opened[2:])


def test_from_new_run_to_hostile_rows_and_back_with_a_name(page: Page, closed, preview, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "BACKGROUND", Background())
    monkeypatch.setattr(planning.Planning, "_read_model", lambda self, config: Model(SMALL, chat_template=True))
    preview.words = f"{NASTY}\u202e\x00</p>"
    data = tmp_path / "rows <b>bold.jsonl"
    data.write_text(json.dumps({"text": NASTY}), "utf-8")
    draft.save_config(closed.workspace, RunConfig.from_dict({"data": {"path": str(data), "sequence_length": 256}}))
    page.goto(closed.link("new_run"))
    page.locator("#look-closely").click()
    expect(page.get_by_role("tab", name=TEXTS["shell"]["page_data"])).to_have_attribute("aria-selected", "true", **PATIENCE)
    rows, shown = page.locator("#row-browser"), f"{NASTY}⟨U+202E⟩⟨U+0000⟩</p>"
    expect(rows.locator(".turn.user")).to_contain_text(shown, **PATIENCE)
    expect(page.locator("#look-data-path input")).to_have_value(str(data), **PATIENCE)
    page.get_by_role("radio", name=WORDS["view_tokens"]).click()
    expect(rows.locator(".tokens")).to_contain_text(shown, **PATIENCE)
    number(page).fill("2")
    number(page).press("Enter")
    expect(rows.locator(".look-row")).to_contain_text(f"not used: the role `{shown}` is not known", **PATIENCE)
    number(page).fill("101")
    number(page).press("Enter")
    expect(rows.locator(".look-row")).to_contain_text("There is no row 101", **PATIENCE)
    page.get_by_role("searchbox", name=WORDS["search"]).fill(NASTY)
    page.get_by_role("searchbox", name=WORDS["search"]).press("Enter")
    expect(rows.locator(".look-hits mark")).to_have_text(NASTY, **PATIENCE)
    expect(page.locator("#figure-view")).to_contain_text(f"the role `{shown}` is not known", **PATIENCE)
    assert page.locator(".look-widget").locator("img, script").count() == 0
    assert page.evaluate("window.hacked") is None

    sets = page.locator("#saved-sets")
    sets.get_by_label(WORDS["set_name"]).fill("my data")
    sets.get_by_role("button", name=WORDS["save"]).click()
    expect(sets).to_contain_text("cannot be the name", **PATIENCE)
    sets.get_by_label(WORDS["set_name"]).fill("my-data")
    sets.get_by_label(WORDS["set_name"]).press("Enter")
    named = sets.locator("[data-set='my-data']")
    expect(named).to_contain_text(data.name, **PATIENCE)
    named.get_by_role("button", name=WORDS["set_use"]).click()
    expect(page.get_by_role("tab", name=TEXTS["shell"]["page_new_run"])).to_have_attribute("aria-selected", "true", **PATIENCE)
    expect(page.locator("#option-data-path input")).to_have_value("Saved: my-data", **PATIENCE)
    expect(page.locator("#data-facts")).to_contain_text("Plain text", **PATIENCE)
    expect(page.locator("#start")).to_be_enabled(**PATIENCE)

    page.get_by_role("tab", name=TEXTS["shell"]["page_data"]).click()
    named.get_by_role("button", name=WORDS["set_open"]).click()
    expect(page.locator("#look-data-path input")).to_have_value("Saved: my-data", **PATIENCE)
    named.get_by_role("button", name=WORDS["set_delete"]).click()
    page.get_by_role("dialog").get_by_role("button", name=WORDS["set_delete"]).click()
    expect(named).to_have_count(0, **PATIENCE)
    assert recipes.names(closed.workspace) == []
