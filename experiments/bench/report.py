"""Size of reports and the time to open them, beside their bars: a sweep of 1,000 points, and runs on 512 GPUs.

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
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.shared import AsJson, bench_row, print_bench
from simrl.scenario.load import load_scenarios
from simrl.show.comparison import compare_scenarios
from simrl.show.report.page import write_report
from simrl.study.sweep import write_table

ROOT = Path(__file__).parents[2]
SYSTEMS = ("verl_colocated", "one_step_off", "areal", "rhymerl", "partial_rollout")
MOST_MB, MOST_S = 6.0, 2.0


def made_up_sweep(folder: Path, points: int) -> Path:
    """Write the table of a sweep with made-up rows: drawing takes as long as with simulated ones."""
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
                "occupancy": i % 90 / 100,
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
    """Simulate two systems, 20 updates, 256 workers of two GPUs."""
    changes = ["cluster.gpus=512", "vary=[]", "systems=[verl_colocated,areal]"]
    compare_scenarios(
        load_scenarios(ROOT / "experiments" / "math_14b.yaml", changes), folder, jobs=1
    )
    return folder


def opening_s(page: Path) -> dict[str, float] | None:
    """Return the seconds to the first text and the first pictures, and CPU seconds, in a new browser; None without one."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None or find_spec("selenium") is None:
        return None
    from selenium import webdriver

    os.environ["SE_OFFLINE"] = "true"
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1366,768",
    ):
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
    started = time.perf_counter()
    write_report(folder, page)
    rows = [
        bench_row(f"{name}: written in", time.perf_counter() - started),
        bench_row(f"{name}: size", page.stat().st_size / 1e6, MOST_MB, "MB"),
    ]
    opened = [found for _ in range(repeats) if (found := opening_s(page)) is not None]
    if opened:
        for key, words in (
            ("text", "text after"),
            ("drawn", "pictures after"),
            ("cpu", "of it CPU"),
        ):
            seconds = [each[key] for each in opened]
            spread = f"{words} ({min(seconds):.2f} to {max(seconds):.2f})"
            rows.append(bench_row(f"{name}: {spread}", statistics.median(seconds), MOST_S))
    return rows


def main(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="of results, in place of those made here")
    ] = None,
    points: Annotated[int, typer.Option(min=1, help="of the sweep")] = 1000,
    repeats: Annotated[int, typer.Option(min=1, help="openings, each in a new browser")] = 5,
    as_json: AsJson = False,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if folders:
            given = {folder.name: folder for folder in folders}
        else:
            given = {f"a sweep of {points:,} points": made_up_sweep(place / "sweep", points)}
            given["two runs on 512 GPUs"] = runs_on_512_gpus(place / "runs")
        rows = [
            row
            for what, folder in given.items()
            for row in measured(what, folder, place / "page.html", repeats)
        ]
    print_bench(rows, as_json)
    if not as_json and not any("pictures" in row["what"] for row in rows):
        print(
            "No Chromium with its driver here (apt-get install chromium chromium-driver): opening was not timed."
        )


if __name__ == "__main__":
    typer.run(main)
