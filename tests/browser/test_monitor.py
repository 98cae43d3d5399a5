"""The monitor page in a real browser: it shows the run folder, keeps what the reader chose, and stays light."""

import re
import urllib.error
import urllib.request

import pytest
from playwright.sync_api import Page, expect

from megatrain.errors import RunError
from megatrain.runs.records import RunState
from ui import controls

pytestmark = pytest.mark.browser

PATIENCE = {"timeout": 60_000}
PLOT = ".chart[data-chart='loss'] .main-svg"
RANGES = "() => [...document.querySelectorAll('.chart .js-plotly-plot')].map(plot => plot._fullLayout.xaxis.range)"

EQUAL_RANGES = f"""() => {{
    const all = ({RANGES})();
    return all.length === 8 && all.every(one => one.every((x, i) => Math.abs(x - all[0][i]) < 1e-6));
}}"""


def open_run(page: Page, dashboard, run, **link) -> None:
    page.goto(dashboard.link("monitor", run, **link))
    page.locator(PLOT).first.wait_for()


def polls(page: Page) -> list[str]:
    """The names of the server functions that the page calls, from now on."""
    called: list[str] = []

    def note(request) -> None:
        if request.method == "POST" and "component_server" in request.url:
            called.append((request.post_data_json or {}).get("fn_name", ""))

    page.on("request", note)
    return called


def wait_for_polls(page: Page, called: list[str], count: int) -> None:
    until = len(called) + count
    while len(called) < until:
        page.wait_for_timeout(100)


def tick(page: Page) -> None:
    """One poll now, and wait for its reply."""
    with page.expect_response(lambda response: "component_server" in response.url and "poll" in (response.request.post_data or "")):
        page.evaluate("MegaTrain.say('megatrain:refresh')")


def test_a_live_run_is_shown_and_moves(page: Page, dashboard):
    run = dashboard.run("my run").start(60).train(60)
    open_run(page, dashboard, run)
    expect(page.get_by_role("listitem").filter(has_text="Train").first).to_contain_text("60 / 3,000")
    expect(page.locator("[data-number='vram']")).to_contain_text("5.30 GiB")
    page.locator(".chart[data-chart='gpu']").scroll_into_view_if_needed()
    expect(page.locator(".chart .js-plotly-plot")).to_have_count(8)
    expect(page).to_have_title(re.compile(r"^2% · \d\.\d{3} · MegaTrain$"))
    run.train(40)
    expect(page.get_by_role("listitem").filter(has_text="Train").first).to_contain_text("100 / 3,000", **PATIENCE)
    expect(page.locator(".event-list")).to_contain_text("Checkpoint of step 100", **PATIENCE)
    expect(page.locator(".strip")).to_contain_text("step 100 of 3,000", **PATIENCE)


def test_without_a_gpu_the_charts_say_so(page: Page, dashboard):
    open_run(page, dashboard, dashboard.run(gpu=False).start(20).train(20))
    for name in ("vram", "bus", "gpu"):
        expect(page.locator(f".chart[data-chart='{name}']")).to_contain_text("No GPU in this run")


def test_an_empty_workspace_says_what_to_do(page: Page, dashboard):
    page.goto(dashboard.link("monitor"))
    expect(page.get_by_text("Nothing to watch yet")).to_be_visible(**PATIENCE)
    page.get_by_role("button", name="Set up a run").click()
    expect(page.get_by_role("tab", name="New run")).to_have_attribute("aria-selected", "true")


def test_zoom_is_shared_and_survives_ticks_and_ends_with_the_run(page: Page, dashboard):
    other = dashboard.run("other").start(50).train(50)
    other.state(RunState.FINISHED)
    run = dashboard.run("zoomed").start(300).train(300)
    page.set_viewport_size({"width": 1280, "height": 2400})  # charts out of sight are not drawn
    open_run(page, dashboard, run)
    box = page.locator(".chart[data-chart='loss'] .nsewdrag").first.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.3, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, y, steps=5)
    page.mouse.up()
    expect(page.get_by_role("button", name="Reset zoom")).to_be_enabled()
    page.wait_for_function(EQUAL_RANGES)  # not at once: charts that a poll is drawing follow with the next
    zoomed = page.evaluate(RANGES)
    assert 60 < zoomed[0][0] < 150
    assert 150 < zoomed[0][1] < 240
    for _ in range(5):
        run.train(1)
        tick(page)
    assert page.evaluate(RANGES)[0] == pytest.approx(zoomed[0])
    page.mouse.dblclick(box["x"] + box["width"] / 2, y)
    page.wait_for_function("() => document.querySelector('.chart .js-plotly-plot')._fullLayout.xaxis.range[0] === 1")
    expect(page.get_by_role("button", name="Reset zoom")).to_be_disabled()
    page.get_by_label("Run", exact=True).select_option(other.run_id)
    expect(page.locator("#run-head")).to_contain_text("Finished", **PATIENCE)
    page.wait_for_function("() => document.querySelector('.chart .js-plotly-plot')._fullLayout.xaxis.range[1] === 50")


def test_links_name_page_and_run(page: Page, dashboard):
    run = dashboard.run("linked").start(20).train(20)
    page.goto(dashboard.address)
    page.locator(PLOT).first.wait_for()
    page.wait_for_url(re.compile(f"view=monitor.*run={run.run_id}|run={run.run_id}.*view=monitor"))
    page.get_by_role("tab", name="Runs").click()
    page.wait_for_url(re.compile("view=runs"))
    page.reload()
    expect(page.get_by_role("tab", name="Runs")).to_have_attribute("aria-selected", "true", **PATIENCE)
    expect(page.locator(".strip")).to_contain_text("step 20", **PATIENCE)
    monitor = page.get_by_role("tab", name="Monitor")
    for _ in range(60):  # on a busy machine a second may lie between two keys
        if monitor.get_attribute("aria-selected") == "true":
            break
        page.keyboard.press("g")
        page.keyboard.press("m")
        page.wait_for_timeout(300)
    page.locator(PLOT).first.wait_for()
    page.wait_for_url(re.compile("view=monitor"))
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_contain_text("Pause or continue")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_a_link_to_no_page_shows_one(page: Page, dashboard):
    run = dashboard.run("linked").start(20).train(20)
    page.goto(dashboard.link("nowhere", run))
    page.wait_for_url(re.compile("view=monitor"))
    page.locator(PLOT).first.wait_for()


def test_a_click_before_the_page_has_settled_counts(page: Page, dashboard):
    run = dashboard.run("linked").start(20).train(20)
    page.goto(dashboard.link("monitor", run))
    page.get_by_role("tab", name="Runs").click()
    page.wait_for_url(re.compile("view=runs"))
    page.wait_for_timeout(1500)
    expect(page.get_by_role("tab", name="Runs")).to_have_attribute("aria-selected", "true")
    assert "view=runs" in page.url


def test_a_key_while_the_page_loads_does_not_lose_the_link(page: Page, dashboard):
    run = dashboard.run("linked").start(20).train(20)
    page.goto(dashboard.link("monitor", run), wait_until="commit")
    for _ in range(10):
        page.keyboard.press("Shift")
        page.wait_for_timeout(50)
    page.locator(PLOT).first.wait_for()
    expect(page.get_by_role("tab", name="Monitor")).to_have_attribute("aria-selected", "true", **PATIENCE)
    assert "view=monitor" in page.url


def test_the_chart_bar_is_remembered(page: Page, dashboard):
    run = dashboard.run().start(700).train(700)
    open_run(page, dashboard, run)
    page.get_by_role("radio", name="Last 500 steps").click()
    page.get_by_label("Log scale").check()
    page.wait_for_function("() => document.querySelector('.chart .js-plotly-plot')._fullLayout.xaxis.range[0] === 201")
    page.reload()
    page.locator(PLOT).first.wait_for()
    expect(page.get_by_role("radio", name="Last 500 steps")).to_have_attribute("aria-checked", "true")
    expect(page.get_by_label("Log scale")).to_be_checked()
    run.train(3)
    tick(page)
    page.wait_for_function("() => document.querySelector('.chart .js-plotly-plot')._fullLayout.yaxis.type === 'log'")
    page.get_by_role("radio", name="Time").click()
    expect(page.locator(".chart[data-chart='loss']")).to_contain_text("minutes since the start", **PATIENCE)


def test_a_reply_that_was_on_its_way_does_not_undo_a_choice(page: Page, dashboard):
    run = dashboard.run().start(60).train(60)
    open_run(page, dashboard, run)
    held: list = []  # the first poll with the old settings, kept from the server until the choice is made

    def hold(route) -> None:
        if held or (route.request.post_data_json or {}).get("fn_name") != "poll":
            route.continue_()
        else:
            held.append(route)

    to_server = re.compile("component_server")
    page.route(to_server, hold)
    run.train(1)
    for _ in range(200):
        if held:
            break
        page.wait_for_timeout(50)
    page.get_by_role("radio", name="Time").click()
    held[0].continue_()
    expect(page.locator(".chart[data-chart='loss']")).to_contain_text("minutes since the start", **PATIENCE)
    page.unroute(to_server)


def test_nothing_is_polled_while_nobody_looks(page: Page, dashboard):
    run = dashboard.run().start(30).train(30)
    called = polls(page)
    page.goto(dashboard.link("runs", run))
    page.get_by_role("tab", name="Runs", selected=True).wait_for()
    wait_for_polls(page, called, 3)
    assert "poll" not in called, "the monitor was never opened"
    page.get_by_role("tab", name="Monitor").click()
    page.locator(PLOT).first.wait_for()
    page.get_by_role("tab", name="Runs").click()
    page.wait_for_timeout(500)
    called.clear()
    wait_for_polls(page, called, 3)
    assert "poll" not in called, "the monitor is hidden"
    page.evaluate("Object.defineProperty(document, 'visibilityState', {get: () => 'hidden', configurable: true})")
    page.wait_for_timeout(500)
    called.clear()
    page.wait_for_timeout(3500)
    assert called == [], "the browser tab is hidden"
    page.evaluate("delete document.visibilityState; document.dispatchEvent(new Event('visibilitychange'))")
    wait_for_polls(page, called, 1)


def test_reload_and_link_show_the_same_run(page: Page, dashboard):
    first = dashboard.run("first").start(20).train(20)
    first.state(RunState.FINISHED)
    dashboard.run("second").start(30).train(30)
    open_run(page, dashboard, first)
    expect(page.get_by_label("Run", exact=True)).to_contain_text("first")
    page.reload()
    page.locator(PLOT).first.wait_for()
    expect(page.locator("#run-head")).to_contain_text("Finished")
    assert f"run={first.run_id}" in page.url


def test_many_ticks_leave_no_nodes_behind(page: Page, dashboard):
    run = dashboard.run().start(200).train(200)
    open_run(page, dashboard, run)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def nodes() -> int:
        session.send("HeapProfiler.collectGarbage")
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(item["value"] for item in metrics if item["name"] == "Nodes")

    counts = []
    for _ in range(3):
        for _ in range(5):
            run.train(1)
            tick(page)
        page.wait_for_timeout(300)
        counts.append(nodes())
    assert counts[2] < counts[1] * 1.05 + 200, counts


def test_wishes_are_shown_in_every_tab_until_they_are_answered(page: Page, dashboard, context):
    run = dashboard.run().start(150).train(150)
    open_run(page, dashboard, run)
    second = context.new_page()
    second.goto(dashboard.link("monitor", run))
    page.locator("#run-head").get_by_role("button", name="Pause").click()
    expect(page.get_by_text("Pause is requested; it happens after step 151.")).to_be_visible(**PATIENCE)
    assert run.store.state().pending_command == "pause"
    expect(second.get_by_text("Pause is requested; it happens after step 151.")).to_be_visible(**PATIENCE)
    pause = page.locator("#run-head").get_by_role("button", name=re.compile("^Pause"))
    expect(pause).to_have_attribute("aria-disabled", "true")
    expect(pause).to_have_attribute("title", "Waits until the last request is answered.")
    assert run.store.take_command() == "pause"
    run.state(RunState.PAUSED)
    expect(page.locator("#run-head").get_by_role("button", name="Continue")).to_be_visible(**PATIENCE)


def test_stopping_asks_and_says_what_it_costs(page: Page, dashboard):
    run = dashboard.run().start(112).train(112)
    open_run(page, dashboard, run)
    head = page.locator("#run-head")
    head.get_by_role("button", name="Stop without saving").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Loses 12 steps: the newest checkpoint is of step 100.")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_have_count(0)
    assert run.store.state().pending_command is None
    head.get_by_role("button", name="Stop and save").click()
    expect(page.get_by_role("dialog")).to_contain_text("about 38 s, 17.2 GiB")
    page.get_by_role("dialog").get_by_role("button", name="Stop and save").click()
    expect(page.get_by_text("Stop is requested; it happens after step 113")).to_be_visible(**PATIENCE)
    assert run.store.state().pending_command == "stop"


def test_a_wish_that_cannot_be_fulfilled_says_why(page: Page, dashboard, monkeypatch):
    def refuse(store, action):
        raise RunError("The record is locked.", "Try again.")

    run = dashboard.run().start(12).train(12)
    open_run(page, dashboard, run)
    monkeypatch.setattr(controls, "act", refuse)
    page.locator("#run-head").get_by_role("button", name="Checkpoint now").click()
    expect(page.get_by_role("alert").filter(has_text="The record is locked. Try again.")).to_be_visible(**PATIENCE)


def test_a_crashed_run_is_explained(page: Page, dashboard):
    run = dashboard.run().start(140).train(140)
    run.checkpoint_folder(100)
    run.vanish()
    open_run(page, dashboard, run)
    card = page.locator(".explanation")
    expect(card).to_contain_text("The process vanished")
    expect(card).to_contain_text("Resume goes on from step 100.")
    expect(card.get_by_role("button", name="Resume")).to_be_visible()
    card.get_by_text("Details").click()
    expect(card).to_contain_text("4,213 rows read")


def test_text_of_a_run_never_becomes_markup(page: Page, dashboard):
    run = dashboard.run("<img src=x onerror=document.title='owned'> `${1+1}` {{7*7}}").start(20).train(20)
    with (run.folder / "worker.log").open("a", encoding="utf-8") as log:
        log.write("<script>document.title='owned'</script> ${document.title='owned'}\n")
    run.event("notice", {"level": "warning", "text": "<b id=owned>bold</b>"})
    open_run(page, dashboard, run)
    expect(page.locator(".event-list")).to_contain_text("<b id=owned>bold</b>")
    expect(page.locator(".log-lines")).to_contain_text("<script>document.title='owned'</script>")
    expect(page.locator(".strip-name")).to_contain_text("`${1+1}` {{7*7}}")
    assert page.locator("#owned").count() == 0
    assert "owned" not in page.title().replace("onerror=document.title='owned'", "")


def test_the_log_is_followed_filtered_and_searched(page: Page, dashboard):
    run = dashboard.run().start(20).train(20)
    with (run.folder / "worker.log").open("a", encoding="utf-8") as log:
        log.writelines(f"12:00:00 INFO  line {number}\n" for number in range(2500))
        log.write("10 %\r55 %\r100 % done\n12:00:01 ERROR it broke\n")
    open_run(page, dashboard, run)
    lines = page.locator(".log-lines .line")
    expect(lines).to_have_count(2000)
    expect(lines.last).to_have_text("12:00:01 ERROR it broke")
    expect(lines.nth(1998)).to_have_text("100 % done")
    assert page.evaluate("(b => b.scrollHeight - b.scrollTop - b.clientHeight)(document.querySelector('.log-lines'))") < 8
    page.get_by_label("Level").select_option("2")
    expect(lines).to_have_count(1)
    page.get_by_label("Level").select_option("0")
    page.get_by_label("Search the log").fill("line 2499")
    expect(lines).to_have_count(1)
    page.get_by_label("Search the log").fill("nowhere")
    expect(page.locator(".log-lines")).to_contain_text("No line matches.")
    page.get_by_label("Search the log").fill("")
    page.locator(".log-lines").evaluate("box => { box.scrollTop = 100; }")
    expect(page.get_by_label("Follow")).not_to_be_checked()
    run.train(1)
    tick(page)
    assert page.locator(".log-lines").evaluate("box => box.scrollTop") < 200


@pytest.mark.parametrize("same_version", [True, False])
def test_the_page_outlives_the_dashboard(page: Page, dashboard, same_version):
    run = dashboard.run().start(20).train(20)
    open_run(page, dashboard, run)
    dashboard.stop()
    banner = page.get_by_text("The dashboard does not answer. Training goes on; this page reconnects by itself.")
    expect(banner).to_be_visible(**PATIENCE)
    run.train(5)
    dashboard.start(same_version)
    expect(banner).to_be_hidden(**PATIENCE)
    expect(page.locator(".strip")).to_contain_text("step 25 of 3,000", **PATIENCE)
    expect(page.get_by_role("tab", name="Monitor")).to_have_attribute("aria-selected", "true", **PATIENCE)
    page.locator(PLOT).first.wait_for()
    page.faults.clear()  # the browser itself reports requests that failed meanwhile


@pytest.mark.parametrize("view", ["new_run", "monitor", "runs"])
def test_no_page_scrolls_sideways_on_a_phone(page: Page, dashboard, view):
    page.set_viewport_size({"width": 390, "height": 844})
    run = dashboard.run("a run with quite a long name that does not fit").start(130).train(130)
    page.goto(dashboard.link(view, run))
    expect(page.locator(".strip")).to_contain_text("step 130", **PATIENCE)
    if view == "monitor":
        page.locator(PLOT).first.wait_for()
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_every_control_of_the_monitor_has_a_name(page: Page, dashboard):
    open_run(page, dashboard, dashboard.run().start(20).train(20))
    nameless = page.evaluate("""() => {
      const controls = document.querySelectorAll(':is(.strip, #page-monitor) :is(button, input, select, textarea, [role=img])');
      const named = node => node.getAttribute('aria-label') || node.textContent.trim() || node.labels?.length || node.title;
      return [...controls].filter(node => node.getClientRects().length && !named(node)).map(node => node.outerHTML);
    }""")
    assert nameless == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_colour_the_charts(page: Page, dashboard, theme):
    run = dashboard.run().start(20).train(20)
    open_run(page, dashboard, run, theme=theme)
    colour = page.evaluate("document.querySelector('.chart .js-plotly-plot')._fullData[1].line.color")
    assert colour == {"light": "#0b68a9", "dark": "#58b4e8"}[theme]


def test_a_foreign_host_gets_400(dashboard):
    request = urllib.request.Request(dashboard.address, headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 400
    refused.value.close()
