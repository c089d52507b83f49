"""The HTML of a mail in a real browser: the plot is shown, and it fits a telephone and a desk."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

from support.records.issues import issue
from tocsin.actions.receivers.email.body import _page, html_of
from tocsin.actions.receivers.message import message_of
from tocsin.actions.receivers.picture import drawing_of, render
from tocsin.schemas.records.issues import Evidence, Series

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)

WIDTHS = {"phone": 375, "desktop": 1200}

_MEASURE = """{frames}<script>
onload = () => {{
  const found = {{}};
  for (const frame of document.querySelectorAll("iframe")) {{
    const mail = frame.contentDocument, picture = mail.images[0];
    found[frame.id] = {{
      heading: mail.querySelector("h1").innerText, width: mail.documentElement.scrollWidth,
      pixels: picture.naturalWidth, shown: picture.width, scripts: mail.scripts.length,
      bold: mail.querySelectorAll("b").length,
      background: getComputedStyle(mail.body).backgroundColor,
      text: getComputedStyle(mail.querySelector(".value")).color,
      label: getComputedStyle(mail.querySelector(".label")).display,
    }};
  }}
  document.body.textContent = JSON.stringify(found);
}}
</script>"""
_FRAME = (
    '<iframe id="{name}" width="{width}" height="900" frameborder="0" srcdoc="{page}"></iframe>'
)


def test_what_a_run_wrote_is_text_and_never_a_template() -> None:
    hostile = """<b title="x">'bold'</b> & {{ 7 * 7 }} {% raw %}"""
    page = html_of(message_of(issue().model_copy(update={"reason": hostile})), None)
    assert "<b" not in page.partition("<body")[2].replace("<body", "")
    assert "{{ 7 * 7 }} {% raw %}" in page
    assert "<img" not in page


def test_a_value_that_the_template_lacks_is_a_fault() -> None:
    with pytest.raises(UndefinedError):
        _page().render(message=message_of(issue()))


@pytest.mark.parametrize(
    ("dark", "colours"),
    [
        ((), ("rgb(255, 255, 255)", "rgb(29, 29, 31)")),
        (("--force-dark-mode",), ("rgb(28, 28, 30)", "rgb(242, 242, 247)")),
    ],
    ids=["light", "dark"],
)
@pytest.mark.skipif(not BROWSER, reason="there is no Chromium on this machine")
def test_a_browser_shows_the_mail_with_its_plot(
    tmp_path: Path, dark: tuple[str, ...], colours: tuple[str, str]
) -> None:
    values = tuple(0.5 + step / 7 for step in range(20))
    series = Series(name="loss", steps=tuple(range(20)), values=values, limit=2.0)
    hostile = "<b>bold</b> <script>document.title = 1</script> " + "w" * 200
    message = message_of(
        issue().model_copy(update={"reason": hostile, "evidence": Evidence(series=series)})
    )
    drawing = drawing_of(message)
    assert drawing is not None
    picture = "data:image/png;base64," + base64.b64encode(render(drawing)).decode()
    page = tmp_path / "page.html"
    mail = html.escape(html_of(message, picture))
    frames = [_FRAME.format(name=name, width=width, page=mail) for name, width in WIDTHS.items()]
    page.write_text(_MEASURE.format(frames="".join(frames)))
    shown = subprocess.run(
        [
            BROWSER, *dark, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
            f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )  # fmt: skip
    body = re.search(r"<body>(\{.*\})</body>", shown.stdout, re.DOTALL)
    assert body is not None, shown.stdout + shown.stderr
    measured: dict[str, dict[str, Any]] = json.loads(html.unescape(body[1]))
    for name, width in WIDTHS.items():
        found = measured[name]
        assert "<b>bold</b>" in found["heading"], "text of a run is text"
        assert (found["scripts"], found["bold"]) == (0, 0)
        assert found["pixels"] >= 600
        assert 200 < found["shown"] <= width
        assert found["width"] <= width, "nothing has to be scrolled sideways"
        assert (found["background"], found["text"]) == colours
    assert measured["phone"]["label"] == "block", "above its value, where there is no room"
    assert measured["desktop"]["label"] == "table-cell", "beside its value"
