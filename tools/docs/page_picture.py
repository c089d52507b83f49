"""Makes the picture of the page: `python tools/docs/page_picture.py docs/images/page.png`.

A ResNet trains under `tocsin run` until it gets a corrupt image, while `tocsin serve` shows it to a
headless Chromium, whose window is the picture. Nothing is drawn by hand.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

SIZE: Final = (1280, 926)
RUN: Final = "digits-resnet"
FAULT_STEP: Final = 150
WAIT_S: Final = 300.0

_ARGUMENTS: Final = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")


def main() -> int:
    """Train, look, write the file that the command line names; the exit code."""
    if len(sys.argv) != 2:
        print("usage: python tools/docs/page_picture.py FILE.png", file=sys.stderr)
        return 2
    file = Path(sys.argv[1]).resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tocsin-picture-") as folder:
        here = Path(folder)
        training = train(here)
        served = start(here, "serve", "--http", "127.0.0.1:0")
        try:
            assert served.stderr is not None
            found = re.search(r"http://\S+/", served.stderr.readline())
            if found is None:
                return 1
            training.wait(WAIT_S)
            take(f"{found[0]}runs/{RUN}", file)
        finally:
            for process in (served, training):
                process.terminate()
                process.communicate()
    print(f"wrote {file}")
    return 0


def train(here: Path) -> subprocess.Popen[str]:
    """A training that goes bad."""
    resnet = ["python", "-m", "tocsin.console.demo.trainings.resnet", "--threads", "1"]
    fault = ["--steps", "2000", "--fault", "nan_batch", "--fault-at", str(FAULT_STEP)]
    labels = ["--label", "team=vision", "--label", "data=digits"]
    return start(here, "run", "--run-id", RUN, *labels, "--", *resnet, *fault)


def start(here: Path, *words: str) -> subprocess.Popen[str]:
    """One of our commands, in a folder of its own."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environ = {**os.environ, "PATH": path, "XDG_CONFIG_HOME": str(here / "config")}
    return subprocess.Popen(
        [sys.executable, "-m", "tocsin.console", *words], cwd=here, env=environ, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def take(url: str, file: Path) -> None:
    """The picture of a page, once the run on it has ended."""
    options = Options()
    options.binary_location = "/usr/bin/chromium"
    for argument in (*_ARGUMENTS, f"--window-size={SIZE[0]},{SIZE[1]}"):
        options.add_argument(argument)
    browser = Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    try:
        metrics = {"width": SIZE[0], "height": SIZE[1], "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(url)
        until = time.monotonic() + WAIT_S
        script = "return document.querySelector('main').innerText"
        while "exited" not in browser.execute_script(script):
            if time.monotonic() > until:
                raise TimeoutError("the run did not come to its end on the page")
            time.sleep(0.5)
        time.sleep(2.0)  # the last numbers
        browser.save_screenshot(str(file))
    finally:
        browser.quit()


if __name__ == "__main__":
    raise SystemExit(main())
