"""A headless Chromium that looks at a page as a reader does: what it shows, what it complains of, what it fetches."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

LAPTOP, PHONE = (1366, 768), (390, 844)
BROWSERS, DRIVERS = ("chromium", "chromium-browser", "google-chrome"), ("chromedriver",)


def _found(names: tuple[str, ...]) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """The system's Chromium through the system's driver; nothing is ever downloaded."""

    def __init__(self) -> None:
        webdriver = pytest.importorskip("selenium.webdriver")
        browser, driver = _found(BROWSERS), _found(DRIVERS)
        if browser is None or driver is None:
            pytest.skip(
                "no Chromium with its driver here: apt-get install chromium chromium-driver"
            )
        os.environ["SE_OFFLINE"] = "true"
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for argument in (
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver: Any = webdriver.Chrome(
            options=options, service=webdriver.ChromeService(driver)
        )

    def quit(self) -> None:
        self.driver.quit()

    def open(
        self,
        page: Path,
        size: tuple[int, int] = LAPTOP,
        drawn: str = "document.documentElement.dataset.drawn === 'yes'",
    ) -> None:
        """The page at a size, its first pictures drawn."""
        self.messages()
        self.requests()
        width, height = size
        metrics = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": size == PHONE,
        }
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get(page.as_uri())
        self.wait(drawn)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: str, seconds: float = 20.0) -> None:
        until = time.monotonic() + seconds
        while not self.js(f"return {condition}"):
            assert time.monotonic() < until, f"never came true: {condition}"
            time.sleep(0.02)

    def messages(self) -> list[str]:
        """What the page complained of since it was asked last."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> set[str]:
        """What the page asked for since it was asked last, pictures in itself left out."""
        events = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        asked = {
            e["params"]["request"]["url"]
            for e in events
            if e["method"] == "Network.requestWillBeSent"
        }
        return {url for url in asked if not url.startswith("data:")}

    def see(self, selector: str) -> None:
        """Scrolls a picture to the middle of the screen and waits until it is drawn."""
        self.js(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        self.wait(
            f"document.querySelector({selector!r}).querySelector('.plotly svg, img') !== null"
        )

    def see_all(self) -> None:
        count = self.js("return document.querySelectorAll('.picture').length")
        for i in range(count):
            self.js(
                "document.querySelectorAll('.picture')[arguments[0]].scrollIntoView({block: 'center'})",
                i,
            )
            self.wait(
                f"document.querySelectorAll('.picture')[{i}].querySelector('.plotly svg, img') !== null"
            )

    def place(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of what is drawn, on the screen."""
        box = self.js(
            f"return document.querySelector({selector!r}).getBoundingClientRect().toJSON()"
        )
        return box["x"], box["y"], box["width"], box["height"]

    def mouse(self, kind: str, x: float, y: float, buttons: int = 0) -> None:
        event = {
            "type": kind,
            "x": x,
            "y": y,
            "button": "left" if buttons or kind != "mouseMoved" else "none",
        }
        self.driver.execute_cdp_cmd(
            "Input.dispatchMouseEvent",
            {**event, "buttons": buttons, "clickCount": int(kind != "mouseMoved")},
        )

    def hover(self, x: float, y: float) -> None:
        """From beside, as a hand does: a mark that the mouse was always on has no hover."""
        for away in (6, 3, 0):
            self.mouse("mouseMoved", x + away, y + away)
            time.sleep(0.06)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, buttons=1)
        for part in (0.3, 0.6, 1.0):
            at = (start[0] + part * (end[0] - start[0]), start[1] + part * (end[1] - start[1]))
            self.mouse("mouseMoved", *at, buttons=1)
            time.sleep(0.03)
        self.mouse("mouseReleased", *end)
