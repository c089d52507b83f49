"""The forms of a report: HTML, Markdown and JSON, of a run with names of somebody hostile."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from support.records.numbered_runs import START_MS, MadeRun, issue_of, view_of
from tocsin.console.files import check_writable
from tocsin.console.report.document import ReportDocument, to_json
from tocsin.console.report.formats import ReportFormat, format_of
from tocsin.console.report.html import to_html
from tocsin.console.report.markdown import to_markdown
from tocsin.console.report.report import Report, report_of
from tocsin.console.report.section import Section
from tocsin.console.report.writing import write_report
from tocsin.schemas.errors import ConfigurationError
from tocsin.schemas.records.runs import RunStarted

HOSTILE = (
    "</style><script>alert(1)</script><img src=x onerror='y'>|`*_[a](javascript:x)\x1b[31m\u202e"
)
VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})


class Reader(HTMLParser):
    """Reads a page, and fails where an element is closed that was not opened last."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def hostile() -> Report:
    run = MadeRun()
    steps = np.ones(60)
    run.scalar("loss", np.where(steps.cumsum() > 40, np.nan, 2))
    run.scalar("step_time_s", 0.1 * steps).scalar(f"log.{HOSTILE}", steps)
    run.tensors("gradients", "l2", [HOSTILE, "b"], np.ones((2, 6)))
    run.tensors("labels", "labels", [HOSTILE, "b"], np.ones((2, 1)))
    run.node({"cpu.percent": 50 * steps, "cpu.iowait_percent": steps}, name=HOSTILE)
    started = RunStarted.model_validate(
        {"run_id": run.run_id, "incarnation": run.incarnation, "job_id": "j", "command": HOSTILE,
         "node": HOSTILE, "optimizer": HOSTILE, "labels": {"a": HOSTILE}}
    )  # fmt: skip
    subject = {"kind": "tensor", "name": HOSTILE, "collection": "gradients"}
    series = {"name": HOSTILE, "steps": [1, 2], "values": [1, "Infinity"]}
    evidence = {"facts": [{"name": HOSTILE, "value": HOSTILE}], "series": series,
                "explanation": HOSTILE, "also": [HOSTILE]}  # fmt: skip
    issue = issue_of(
        run, reason=HOSTILE, remedy=HOSTILE, rule=HOSTILE, subject=subject, evidence=evidence,
        last_good_checkpoint={"path": HOSTILE, "step": 3},
    )  # fmt: skip
    view = view_of(run, labels={"a": HOSTILE}, rules={HOSTILE: "error"}, last_loss="NaN")
    return report_of(run.say(started, view, issue), now_ms=START_MS)


def test_commands_in_a_sentence_are_set_as_code_and_stay_escaped(hostile: Report) -> None:
    section = Section(key="k", title="T", finding="see `a <b>` & `c", advice="try `tocsin why`")
    html = to_html(replace(hostile, sections=[section]))
    assert "see <code>a &lt;b&gt;</code> &amp; `c" in html
    assert "try <code>tocsin why</code>" in html


def test_html_is_whole_and_has_no_script(hostile: Report) -> None:
    reader = read(to_html(hostile))
    assert not reader.tags & {"script", "img", "iframe", "object", "link", "form", "input", "base"}
    for _, name, value in reader.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "style", "srcset")
        if name == "href":
            assert value.startswith("#")


def test_html_takes_nothing_from_elsewhere(hostile: Report) -> None:
    html = to_html(hostile)
    assert "url(" not in html
    assert "@import" not in html
    assert set(re.findall(r"https?://[^\s\"'<]+", html)) == {"http://www.w3.org/2000/svg"}


def test_the_policy_allows_the_style_by_its_hash_and_nothing_else(hostile: Report) -> None:
    html = to_html(hostile)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.S)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = next(
        value for tag, name, value in read(html).attributes if (tag, name) == ("meta", "content")
    )
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def test_ids_are_there_once_and_each_link_leads_to_one(hostile: Report) -> None:
    reader = read(to_html(hostile))
    assert len(set(reader.ids)) == len(reader.ids)
    links = [value[1:] for _, name, value in reader.attributes if name == "href"]
    assert set(links) <= set(reader.ids)
    assert len(links) == len(hostile.sections)


def test_headings_go_down_by_one(hostile: Report) -> None:
    levels = [int(level) for level in re.findall(r"<h([1-6])>", to_html(hostile))]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))


def test_html_shows_names_as_they_are(hostile: Report) -> None:
    text = "".join(read(to_html(hostile)).text)
    assert "<script>alert(1)</script>" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_equal_runs_give_equal_reports(hostile: Report) -> None:
    assert to_html(hostile) == to_html(hostile)


def test_markdown_escapes_what_others_wrote(hostile: Report) -> None:
    markdown = to_markdown(hostile)
    assert not re.search(r"(?<!\\)<", markdown)
    assert not re.search(r"(?<!\\)\]\(", markdown)
    for line in markdown.splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)
            assert cells[0] == cells[-1] == ""


def test_json_has_its_version_and_keeps_nan(hostile: Report) -> None:
    document = json.loads(to_json(hostile))
    assert document["version"] == 1
    assert {"name": "last loss", "value": "NaN", "unit": None} in document["facts"]
    keys = [section["key"] for section in document["sections"]]
    assert keys[:3] == ["training", "issues", "stop"]
    assert len(set(keys)) == len(keys)


def test_json_is_what_its_schema_says(hostile: Report) -> None:
    schema = ReportDocument.model_json_schema(mode="serialization")
    jsonschema.Draft202012Validator(schema).validate(json.loads(to_json(hostile)))


@pytest.mark.parametrize(
    ("name", "wanted", "found"),
    [
        (None, None, ReportFormat.HTML),
        ("a.md", None, ReportFormat.MD),
        ("a.json", None, ReportFormat.JSON),
        ("a", None, ReportFormat.HTML),
        ("a.md", ReportFormat.JSON, ReportFormat.JSON),
    ],
)
def test_the_name_of_the_file_tells_the_format(
    name: str | None, wanted: ReportFormat | None, found: ReportFormat
) -> None:
    assert format_of(None if name is None else Path(name), wanted) is found


def test_a_file_of_another_format_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"a\.pdf: expected .*\.html, \.md or \.json"):
        format_of(Path("a.pdf"), None)


def test_a_report_is_written_whole_or_not_at_all(hostile: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    assert write_report(hostile, path, ReportFormat.MD) == path
    assert path.read_text() == to_markdown(hostile)
    assert [one.name for one in tmp_path.iterdir()] == ["report.md"]
    with pytest.raises(ConfigurationError, match="cannot write"):
        write_report(hostile, tmp_path, ReportFormat.MD)
    assert [one.name for one in tmp_path.iterdir()] == ["report.md"]


def test_standard_output_is_not_replaced(
    hostile: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write_report(hostile, Path("/dev/stdout"), ReportFormat.MD) is None
    assert capsys.readouterr().out == to_markdown(hostile)


def test_a_report_goes_through_a_link_and_into_a_pipe(hostile: Report, tmp_path: Path) -> None:
    target, link, pipe = (tmp_path / name for name in ("target.md", "link.md", "pipe.md"))
    target.write_text("old")
    link.symlink_to(target)
    write_report(hostile, link, ReportFormat.MD)
    assert link.is_symlink()
    assert target.read_text() == to_markdown(hostile)
    os.mkfifo(pipe)
    check_writable(pipe, "--output", "report.md")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text)
        write_report(hostile, pipe, ReportFormat.MD)
        assert read.result() == to_markdown(hostile)
    assert pipe.is_fifo()


def test_a_page_on_standard_output_is_utf_8_whatever_the_locale_is(
    hostile: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "latin-1", errors="replace"))
    write_report(hostile, Path("-"), ReportFormat.HTML)
    sys.stdout.flush()
    assert raw.getvalue().decode() == to_html(hostile)


def test_a_section_of_facts_alone_has_no_badge(hostile: Report) -> None:
    section = Section(key="k", title="t", finding="f")
    html = to_html(replace(hostile, sections=[section]))
    assert "badge" not in html[html.index('id="k"') :]
