"""A headless Chromium for the tests of the page, driven by its own chromedriver.

Without Chromium tests are skipped; where Kafka is required (CI), that is a failure.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from axe_selenium_python import Axe
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from support.servers.kafka_broker import skip_or_fail
from support.waiting import HANGS_S

SIZES: Final = ((375, 812), (1280, 900), (3840, 2160))
THEMES: Final = ("light", "dark")

_ARGUMENTS: Final = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-extensions", "--disable-sync",
)  # fmt: skip


@dataclass(frozen=True)
class Browser:
    """A browser whose one tab is at the page of `base`."""

    driver: Chrome
    base: str

    def at(self, base: str) -> Browser:
        """The same browser for another page."""
        return Browser(self.driver, base.rstrip("/"))

    def open(self, path: str) -> None:
        """Load a page, and wait until it is connected, if it is a live one."""
        self.driver.get(self.base + path)
        if self.run("return document.querySelector('main')?.dataset.events !== undefined"):
            self.until(lambda: self.run("return document.querySelector('main').dataset.live"))

    def run(self, script: str, *arguments: object) -> Any:
        """What a script returns in the tab."""
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        """The first element of a CSS selector."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        """All elements of a CSS selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def button(self, selector: str, words: str) -> WebElement:
        """The button with these words in there."""
        (found,) = [one for one in self.all(f"{selector} button") if one.text == words]
        return found

    def text(self, selector: str = "main") -> str:
        """What a person reads there."""
        found: str = self.run(
            "return document.querySelector(arguments[0])?.innerText ?? ''", selector
        )
        return found

    def until(self, condition: Callable[[], object], timeout_s: float = HANGS_S) -> None:
        """Wait until that is true; fail with what is to be read."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if condition():
                    return
            except StaleElementReferenceException:
                pass  # the page has just replaced it
            assert time.monotonic() < deadline, self.text("body")
            time.sleep(0.15)

    def reads(self, text: str, selector: str = "main") -> None:
        """Wait until a text is to be read there, whatever the spaces in it."""
        self.until(lambda: text in " ".join(self.text(selector).split()))

    def appear(self, width: int, height: int, theme: str = "light") -> None:
        """Make the window so large, and the system light or dark."""
        command = self.driver.execute_cdp_cmd
        metrics: Mapping[str, object] = {
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500,
        }  # fmt: skip
        command("Emulation.setDeviceMetricsOverride", dict(metrics))
        feature = {"name": "prefers-color-scheme", "value": theme}
        command("Emulation.setEmulatedMedia", {"features": [feature]})

    def picture(self, file: Path) -> None:
        """Write what is to be seen as a PNG file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        assert self.driver.save_screenshot(str(file))

    def overflows(self, width: int) -> int:
        """By how many pixels the page is wider than that."""
        found: int = self.run("return document.documentElement.scrollWidth")
        return found - width

    def complaints(self) -> list[str]:
        """What the console has said of this page since it was last asked: errors, refusals of the
        policy. A page of before may complain once more that its server is gone.
        """
        log = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        said = (str(entry["message"]) for entry in log)
        return [one for one in said if self.base in one or "://127.0.0.1:" not in one]

    def violations(self, *rules: str) -> str:
        """What axe finds wrong with the page for people who do not see it, by all of its rules or
        by these; empty: nothing.
        """
        axe = Axe(self.driver)
        axe.inject()
        options = {"runOnly": {"type": "rule", "values": list(rules)}} if rules else {}
        found = axe.run(options=options)["violations"]
        return "\n".join(
            f"{one['id']}: {node['html'][:160]}" for one in found for node in one["nodes"][:4]
        )


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser at no page yet."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        skip_or_fail("no chromium and chromedriver on the PATH: apt install chromium-driver")
    options = Options()
    options.binary_location = str(binary)
    for argument in _ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = Chrome(options=options, service=Service(driver))
    try:
        yield Browser(started, "")
    finally:
        started.quit()
