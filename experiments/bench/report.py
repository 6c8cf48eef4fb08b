"""How large reports are and how fast they open, beside their bars: of a sweep of 1,000 points, and of runs on 512 GPUs.

Opening is counted from the address to the first pictures on the screen, in a Chromium that was just started and does not know
the page: the median of several. CPU seconds of the page's own thread are what a machine without other work takes at the least.

python experiments/bench/report.py [--points 1000] [--repeats 5] [--json] [FOLDER ...]
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from simrl.comparison import compare_scenarios
from simrl.html_report import write_report
from simrl.scenario import load_scenarios
from simrl.sweeps import write_table

ROOT = Path(__file__).parents[2]
SYSTEMS = ("verl_colocated", "one_step_off", "areal", "rhymerl", "partial_rollout")
MOST_MB, MOST_S = 6.0, 2.0


def made_up_sweep(folder: Path, points: int) -> Path:
    """Rows of a sweep's table: what is drawn takes as long whatever was simulated."""
    rows = []
    for i in range(points):
        rate, system = 1 + (i * 7919 % 1000) / 250, SYSTEMS[i % len(SYSTEMS)]
        rows.append(
            {
                "point": i,
                "hash": f"{i:064x}",
                "system.name": system,
                "system.rollout_share": 0.5 + i // 5 % 5 / 10,
                "system.eta": 1 + i // 25 % 4 if system == "areal" else None,
                "cluster.gpus": 16 << (i // 100 % 4),
                "seed": i // 400,
                "variant": "",
                "samples_per_s": rate,
                "tokens_per_s": 5000.0 * rate,
                "step_s": 100 / rate,
                "rollout_bubble": i % 100 / 100,
                "train_idle": i % 37 / 100,
                "off_policyness_mean": i % 400 / 100,
                "off_policyness_max": i % 5,
                "settled": True,
                "gpu_hours_per_1k_samples": 10 / rate,
                "cost_per_1k_samples": 25 / rate,
                "trace_kind": "synthetic",
                "profile_kind": "derived",
                "speedup": rate,
                "speedup_in_variant": rate,
                "error": None,
            }
        )
    (folder / "table").mkdir(parents=True)
    write_table(rows, folder / "table")
    (folder / "sweep.json").write_text(json.dumps({"scenario": "bench.yaml"}))
    return folder


def runs_on_512_gpus(folder: Path) -> Path:
    """Two systems, 20 updates, 256 workers of two GPUs."""
    changes = ["cluster.gpus=512", "vary=[]", "systems=[verl_colocated,areal]"]
    compare_scenarios(load_scenarios(ROOT / "experiments" / "math_14b.yaml", changes), folder, jobs=1)
    return folder


def opening_s(page: Path) -> dict[str, float] | None:
    """Seconds to the first text and the first pictures, and CPU seconds, in a browser of its own; None where there is none."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    try:
        from selenium import webdriver
    except ImportError:
        return None
    if browser is None or driver is None:
        return None
    os.environ["SE_OFFLINE"] = "true"
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1366,768"):
        options.add_argument(argument)
    chrome: Any = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        chrome.get("about:blank")
        time.sleep(1.0)  # its own start is over
        chrome.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        chrome.get(page.as_uri())
        while chrome.execute_script("return document.documentElement.dataset.drawn") != "yes":
            time.sleep(0.02)
        text_ms, drawn_ms = chrome.execute_script(
            "return [performance.getEntriesByName('first-contentful-paint')[0], performance.getEntriesByName('drawn')[0]]"
            ".map(entry => entry.startTime)"
        )
        metrics = chrome.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        cpu_s = next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")
        return {"text": text_ms / 1000, "drawn": drawn_ms / 1000, "cpu": cpu_s}
    finally:
        chrome.quit()


def measured(name: str, folder: Path, page: Path, repeats: int) -> list[dict[str, Any]]:
    """Rows of the table: of one page."""
    started = time.perf_counter()
    write_report(folder, page)
    rows: list[dict[str, Any]] = [
        {"what": f"{name}: written in", "value": time.perf_counter() - started, "unit": "s", "bar": None},
        {"what": f"{name}: size", "value": page.stat().st_size / 1e6, "unit": "MB", "bar": MOST_MB},
    ]
    opened = [found for _ in range(repeats) if (found := opening_s(page)) is not None]
    if opened:
        for key, words in (("text", "text after"), ("drawn", "pictures after"), ("cpu", "of it CPU")):
            seconds = [each[key] for each in opened]
            spread = f"{words} ({min(seconds):.2f} to {max(seconds):.2f})"
            rows.append({"what": f"{name}: {spread}", "value": statistics.median(seconds), "unit": "s", "bar": MOST_S})
    return rows


def main(
    folders: Annotated[list[Path] | None, typer.Argument(help="of results, in place of those made here")] = None,
    points: Annotated[int, typer.Option(min=1, help="of the sweep")] = 1000,
    repeats: Annotated[int, typer.Option(min=1, help="openings, each in a new browser")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table (stable)")] = False,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if folders:
            given = {folder.name: folder for folder in folders}
        else:
            given = {f"a sweep of {points:,} points": made_up_sweep(place / "sweep", points)}
            given["two runs on 512 GPUs"] = runs_on_512_gpus(place / "runs")
        rows = [row for what, folder in given.items() for row in measured(what, folder, place / "page.html", repeats)]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table("what", "measured", "bar", "measured / bar")
    for row in rows:
        bar = row["bar"]
        beside = (f"{bar:g} {row['unit']}", f"{row['value'] / bar:.2f}") if bar else ("", "")
        table.add_row(row["what"], f"{row['value']:.3g} {row['unit']}", *beside)
    console = Console()
    console.print(table)
    if not any("pictures" in row["what"] for row in rows):
        console.print(
            "No Chromium with its driver here (apt-get install chromium chromium-driver): opening was not timed."
        )


if __name__ == "__main__":
    typer.run(main)
