"""The whole story by clicks: start the demo, watch it learn, reload, stop, resume, export, and load the result.

Real worker processes train the built-in model on the CPU.
"""

import re

import pytest
from playwright.sync_api import Page, expect

from megatrain.runs.records import RunState
from megatrain.runs.store import RunStore
from megatrain.runs.supervisor import force_quit, list_runs
from ui import draft
from ui.texts.en import TEXTS

pytestmark = pytest.mark.browser

PATIENCE = {"timeout": 600_000}  # training shares the cores with other tests
STEPS = 40  # enough to be stopped on a fast machine
SMALLER = {"train-num_steps": str(STEPS), "train-global_batch_tokens": "512", "data-max_rows": "300", "evaluation-every_steps": "20"}


@pytest.fixture
def run(dashboard):
    """The store of the only run, once it is there; its worker does not outlive the test."""
    (dashboard.workspace / draft.NAME).unlink(missing_ok=True)
    yield lambda: list_runs(dashboard.workspace)[0]
    for store in list_runs(dashboard.workspace):
        if store.is_live():
            force_quit(store)


def in_strip(page: Page, words: re.Pattern[str]) -> None:
    expect(page.locator("#status-strip")).to_contain_text(words, **PATIENCE)


def steps(store: RunStore) -> list[int]:
    return [row.step for row in store.steps()]


def test_from_a_click_to_an_exported_model(page: Page, dashboard, run):
    page.goto(dashboard.link("new_run"))
    start = page.get_by_role("button", name=TEXTS["new_run"]["start"])
    expect(start).to_be_enabled(**PATIENCE)
    page.get_by_role("button", name=TEXTS["new_run"]["advanced"]).click()
    for key, value in SMALLER.items():
        field = page.locator(f"#option-{key} input")
        field.fill(value)
        field.press("Tab")
    expect(page.locator("#plan-panel")).to_contain_text(f"({STEPS} steps)", **PATIENCE)
    start.click()

    expect(page.get_by_role("tab", name=TEXTS["shell"]["page_monitor"])).to_have_attribute("aria-selected", "true", **PATIENCE)
    in_strip(page, re.compile(rf"step ([2-9]|\d\d) of {STEPS}"))
    expect(page.locator("[data-number='loss']")).to_contain_text(re.compile(r"\d\.\d{3}"))
    page.reload()
    in_strip(page, re.compile(rf"step ([3-9]|\d\d) of {STEPS}"))

    page.locator("#status-strip").get_by_role("button", name=TEXTS["monitor"]["do_stop"]).click()
    page.get_by_role("dialog").get_by_role("button", name=TEXTS["monitor"]["do_stop"]).click()
    in_strip(page, re.compile(TEXTS["states"]["stopped"]))
    stopped_at = run().state().step
    assert 0 < stopped_at < STEPS

    page.get_by_role("tab", name=TEXTS["shell"]["page_runs"]).click()
    row = page.locator(f"tr[data-run='{run().run_id}']")
    row.get_by_role("button").click()
    page.get_by_role("button", name=f"Resume from step {stopped_at}").click()
    expect(page.get_by_role("tab", name=TEXTS["shell"]["page_monitor"])).to_have_attribute("aria-selected", "true", **PATIENCE)
    in_strip(page, re.compile(TEXTS["states"]["finished"]))
    assert run().state().state is RunState.FINISHED
    assert steps(run()) == list(range(1, STEPS + 1))
    evaluated = [event.data["loss"] for event in run().events() if event.kind == "eval"]
    assert len(evaluated) >= 2
    assert evaluated[-1] < evaluated[0]

    page.get_by_role("tab", name=TEXTS["shell"]["page_runs"]).click()
    expect(row).to_contain_text(f"{STEPS} / {STEPS}", **PATIENCE)
    page.get_by_label(TEXTS["runs"]["export_type"]).select_option("fp32")
    page.get_by_role("button", name=TEXTS["runs"]["do_export"]).click()
    result = page.locator(".export")
    expect(result).to_contain_text("transformers loaded it", **PATIENCE)
    folder = result.locator("code").inner_text()
    loads_in_transformers(folder)


def loads_in_transformers(folder: str) -> None:
    """Plain transformers reads the exported folder and every weight in it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = AutoTokenizer.from_pretrained(folder, local_files_only=True)("def add(a, b):", return_tensors="pt")
    assert model(**tokens).logits.isfinite().all()
