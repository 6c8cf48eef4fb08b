"""The report in a headless Chromium, as a reader has it: nothing is complained of or fetched, pictures answer to the mouse, a
laptop and a phone show it without scrolling sideways."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from simrl.show.comparison import compare_scenarios
from simrl.show.report.page import write_report
from simrl.show.style import LOOKS
from tests.browser import LAPTOP, PHONE, Browser
from tests.helpers import scenario
from tests.sweep_double import EVIL, a_sweep, sweep_rows

pytestmark = pytest.mark.slow

POINTS = 1000


@pytest.fixture(scope="module")
def browser():
    """One for the module; skipped where there is none."""
    opened = Browser()
    yield opened
    opened.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of runs, with names that hold markup, and one of a sweep of 1,000 points."""
    folder = tmp_path_factory.mktemp("pages")
    systems = ({"name": "verl_colocated"}, {"name": "areal", "eta": 1}, {"name": "verl_ngram"})
    runs = [
        scenario(
            system,
            name="race",
            steps=4,
            warmup_steps=1,
            variant=f"{EVIL}={gpus}",
            cluster={"gpu": "h100", "gpus": gpus, "tp": 1},
        )
        for gpus in (4, 8)
        for system in systems
    ]
    compare_scenarios(runs, folder / "race", jobs=1)
    rows = sweep_rows(POINTS)
    for row in rows[::50]:
        row |= {"error": f"too little memory {EVIL}", "samples_per_s": None}
    a_sweep(folder / "sweep", rows)
    for name in ("race", "sweep"):
        write_report(folder / name, folder / f"{name}.html")
    return folder


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("name", ["race", "sweep"])
def test_a_page_opens_without_a_complaint_fetches_nothing_and_fits_the_screen(
    browser, pages, name, size
):
    page = pages / f"{name}.html"
    browser.open(page, size)
    browser.see_all()
    assert browser.messages() == []
    assert browser.requests() == {page.as_uri()}
    width, inner = browser.js("return [document.documentElement.scrollWidth, innerWidth]")
    assert width <= inner == size[0]
    assert browser.js("return document.getElementById('trouble').hidden")
    assert (
        browser.js("return document.querySelectorAll('script').length") == 3
    )  # names with markup made none
    too_wide = "return [...document.querySelectorAll('.picture')].filter(p => p.scrollWidth > p.clientWidth + 1).length"
    assert browser.js(too_wide) == 0


@pytest.mark.parametrize("picture", ["speed", "gpu_seconds", "bubble", "staleness"])
def test_on_a_phone_a_picture_keeps_a_width_at_which_its_names_are_read(browser, pages, picture):
    browser.open(pages / "race.html", PHONE)
    browser.see(f"#{picture}")
    _, _, width, _ = browser.place(f"#{picture} img")
    assert width >= 640
    assert browser.place(f"#{picture} .wide")[2] <= PHONE[0]  # moved sideways in its box


@pytest.mark.parametrize("name", ["race", "sweep"])
def test_a_page_is_small(pages, name):
    assert (pages / f"{name}.html").stat().st_size <= 6_000_000


def test_a_picture_says_in_words_what_it_shows(browser, pages):
    browser.open(pages / "race.html")
    browser.see("#speed")
    words, width = browser.js(
        "const i = document.querySelector('#speed img'); return [i.alt, i.naturalWidth]"
    )
    assert words.startswith("Speed: ") and width > 0


def test_the_timeline_says_what_a_worker_does_and_zooms_to_what_is_dragged_over(browser, pages):
    browser.open(pages / "race.html")
    browser.see("#timeline")
    x, y, width, height = browser.place("#timeline .heatmaplayer image")
    browser.hover(x + width * 0.5, y + height * 0.1)
    browser.wait("!document.getElementById('tip').hidden")
    said = browser.js("return document.getElementById('tip').textContent")
    assert re.search(r"^rollout-000: [a-z ]+\n[\d.,]+ s, from [\d.,]+ s on", said)
    assert "policy version" in said or "idle" in said

    shown = "return document.getElementById('timeline').layout.xaxis.range"
    before = browser.js(shown)
    browser.drag((x + width * 0.3, y + height / 2), (x + width * 0.6, y + height / 2))
    browser.wait(f"document.getElementById('timeline').layout.xaxis.range[0] > {before[0]}")
    after = browser.js(shown)
    part = (after[1] - after[0]) / (before[1] - before[0])
    assert 0.2 < part < 0.4
    columns = browser.js(
        "const x = document.getElementById('timeline').data[0].x; return [x[0], x[x.length - 1]]"
    )
    assert columns == pytest.approx(after)  # drawn anew for what is shown

    browser.js("document.getElementById('whole').click()")
    assert browser.js(shown)[0] == 0
    browser.js("document.getElementById('closer').click()")
    whole, closer = browser.js(
        "const t = document.getElementById('timeline'); return [t.layout.xaxis.maxallowed, t.layout.xaxis.range]"
    )
    assert closer[1] - closer[0] == pytest.approx(whole / 2)


def test_idle_time_is_hatched_in_the_timeline_and_in_its_legend(browser, pages):
    browser.open(pages / "race.html")
    browser.see("#timeline")
    ground, lanes = (
        browser.place(f"#timeline .{layer} image")
        for layer in ("layer-below .imagelayer", "heatmaplayer")
    )
    assert ground == pytest.approx(lanes, abs=2)
    marks = browser.js(
        "return [...document.querySelectorAll('#kinds li')].filter(i => i.querySelector('i'))"
        ".map(i => [i.textContent, i.querySelector('i').style.background])"
    )
    hatched = [words for words, background in marks if "repeating-linear-gradient" in background]
    assert len(marks) > 3 and hatched == [
        words for words, _ in marks if words.startswith("idle (bubble)")
    ]
    x, y, width, height = lanes
    area = {
        "x": x + browser.js("return scrollX"),
        "y": y + browser.js("return scrollY"),
        "width": width,
        "height": height,
    }
    shot = browser.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": {**area, "scale": 1}})
    pixels = np.asarray(
        Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    ).reshape(-1, 3)
    idle = [int(LOOKS["idle"].color[i : i + 2], 16) for i in (1, 3, 5)]
    assert (np.abs(pixels - idle).max(axis=1) < 40).mean() > 0.002


def test_workers_and_runs_can_be_chosen(browser, pages):
    browser.open(pages / "race.html")
    browser.see("#timeline")
    set_workers = "const w = document.getElementById('workers'); w.value = arguments[0]; w.dispatchEvent(new Event('input'))"
    lanes = "return document.getElementById('timeline').data[0].z.length"
    all_lanes = browser.js(lanes)
    browser.js(set_workers, "0-1")
    assert browser.js(lanes) < all_lanes
    browser.js(set_workers, "1;drop")
    assert (
        browser.js("return document.getElementById('workers').getAttribute('aria-invalid')")
        == "true"
    )
    browser.js(set_workers, "all")
    assert browser.js(lanes) == all_lanes

    browser.js(
        "const r = document.getElementById('run'); r.value = '2'; r.dispatchEvent(new Event('change'))"
    )
    assert "verl_ngram" in browser.js("return document.getElementById('chosen').textContent")
    assert browser.js(
        "return [...document.querySelectorAll('[data-run]')].filter(d => !d.hidden).map(d => d.dataset.run)"
    ) == ["2"]
    titles = browser.js(
        "return [...document.querySelectorAll('#figures h3')].map(h => h.textContent)"
    )
    assert "Acceptance by sample" in titles
    browser.see_all()
    assert browser.messages() == []


def test_the_summary_sorts_by_a_heading_and_back(browser, pages):
    browser.open(pages / "race.html")
    headings = browser.js(
        "return [...document.querySelectorAll('#summary th')].map(h => h.textContent)"
    )
    column = headings.index("samples/s")
    values = f"return [...document.querySelectorAll('#summary tbody tr')].map(r => Number(r.cells[{column}].dataset.value))"
    click = f"[...document.querySelectorAll('#summary th')][{column}].firstElementChild.click()"
    browser.js(click)
    falling = browser.js(values)
    assert falling == sorted(falling, reverse=True) and len(set(falling)) > 2
    browser.js(click)
    assert browser.js(values) == sorted(falling)
    sort = f"return document.querySelectorAll('#summary th')[{column}].getAttribute('aria-sort')"
    assert browser.js(sort) == "ascending"


def test_rows_without_a_number_stay_last_both_ways(browser, pages):
    browser.open(pages / "race.html")
    numbers = "[...document.querySelectorAll('#summary th')].findIndex((h, i) => !h.classList.contains('text') && i > 1)"
    browser.js(
        f"document.querySelectorAll('#summary tbody tr')[0].cells[{numbers}].removeAttribute('data-value')"
    )
    for _ in range(2):
        browser.js(f"document.querySelectorAll('#summary th')[{numbers}].firstElementChild.click()")
        have_numbers = browser.js(
            f"return [...document.querySelectorAll('#summary tbody tr')].map(r => 'value' in r.cells[{numbers}].dataset)"
        )
        assert have_numbers.index(False) == len(have_numbers) - have_numbers.count(False)


def test_points_of_a_sweep_are_named_sorted_filtered_and_coloured(browser, pages):
    browser.open(pages / "sweep.html")
    browser.see("#scatter")
    x, y, width, height = browser.place("#scatter .scatterlayer .point")
    browser.hover(x + width / 2, y + height / 2)
    browser.wait("document.querySelector('#scatter .hoverlayer .hovertext') !== null")
    assert re.search(
        r"point \d+",
        browser.js("return document.querySelector('#scatter .hoverlayer').textContent"),
    )

    cells = (
        "return [...document.querySelectorAll('#points tbody tr')].map(r => r.cells[4].textContent)"
    )
    rates = [float(text) for text in browser.js(cells)]
    assert len(rates) == 100 and rates == sorted(rates, reverse=True)
    browser.js("document.getElementById('all').click()")
    assert len(browser.js(cells)) == POINTS - POINTS // 50
    browser.js(
        "const f = document.getElementById('filter'); f.value = 'areal gpus=64'; f.dispatchEvent(new Event('input'))"
    )
    browser.wait("document.querySelectorAll('#points tbody tr').length < 90")
    names = browser.js(
        "return [...document.querySelectorAll('#points tbody tr')].map(r => r.cells[1].textContent + r.cells[2].textContent)"
    )
    assert set(names) == {"areal64"}
    assert browser.js("return document.getElementById('scatter').data.length") == 1
    browser.js(
        "const c = document.getElementById('colour'); c.value = 'cluster.gpus'; c.dispatchEvent(new Event('change'))"
    )
    assert browser.js("return document.getElementById('scatter').data.map(t => t.name)") == ["64"]
    assert browser.messages() == []


@pytest.mark.parametrize("name", ["race", "sweep"])
def test_on_paper_there_are_no_controls_and_every_picture(browser, pages, name):
    browser.open(pages / f"{name}.html")
    drawn = "return [...document.querySelectorAll('.picture')].filter(p => p.querySelector('.plotly svg, img')).length"
    browser.js("dispatchEvent(new Event('beforeprint'))")
    browser.wait(
        "[...document.querySelectorAll('.picture')].every(p => p.querySelector('.plotly svg, img'))"
    )
    assert browser.js(drawn) == browser.js("return document.querySelectorAll('.picture').length")
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        hidden = "return [...document.querySelectorAll('.screen')].every(e => getComputedStyle(e).display === 'none')"
        assert browser.js(hidden)
        widths = "return [...document.querySelectorAll('.main-svg')].map(s => s.getBoundingClientRect().width)"
        assert max(browser.js(widths)) <= 700
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        browser.js("dispatchEvent(new Event('afterprint'))")
    printed = browser.driver.execute_cdp_cmd("Page.printToPDF", {})["data"]
    assert base64.b64decode(printed).startswith(b"%PDF")
