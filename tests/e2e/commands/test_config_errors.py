"""A bad configuration is said whole, at its lines and columns, before anything is started."""

from __future__ import annotations

import re
import sys

from support.processes.site import SCRIPTS, Site

FIVE_MISTAKES = """\
version: 1
labels: {env: prod, team: 3}
receivers:
  hook: {type: webhook, url: "ftp://example.com/x"}
rules:
  - nonfinit: [stop]
  - loss_diverged: [stop, hok]
  - exploding_gradient: {params: {factor: -1}}
"""


def test_five_mistakes_give_five_errors_and_nothing_is_started(embedded_site: Site) -> None:
    embedded_site.config.write_text(FIVE_MISTAKES)
    finished = embedded_site.run(sys.executable, str(SCRIPTS / "plain_loop.py"))
    assert finished.exit_code == 2, finished
    assert finished.stdout == ""
    assert finished.summary == {}
    assert not (embedded_site.folder / "bus.db").exists()
    places = re.findall(r"tocsin\.yaml:(\d+):(\d+): ", finished.stderr)
    assert [int(line) for line, _ in places] == [2, 4, 6, 7, 8], finished.stderr
    assert all(int(column) > 1 for _, column in places)
    assert "nonfinite" in finished.stderr  # did you mean
    assert "hook" in finished.stderr
