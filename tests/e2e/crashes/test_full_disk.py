"""A real training fills a real disk: a small one, mounted where only it sees it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.processes.site import SCRIPTS, Site

_MOUNTED = 'mount -t tmpfs -o size=48m none "$1" && cd "$1" && shift && exec "$@"'
_OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")


def test_a_full_disk_is_told_and_the_training_goes_on(embedded_site: Site) -> None:
    small = embedded_site.folder / "small"
    small.mkdir()
    inside = (*_OWN_MOUNTS, _MOUNTED, "sh", str(small))
    try:
        subprocess.run([*inside, "true"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount of its own can be made here: {error}")
    finished = embedded_site.run(sys.executable, str(SCRIPTS / "fills_disk.py"), wrap=inside)
    assert finished.exit_code == 0, finished
    assert "No space left" in finished.stdout
    (issue,) = finished.issues
    assert (issue["rule"], issue["severity"], issue["state"]) == ("disk_full", "critical", "firing")
    free = issue["evidence"]["facts"][0]
    assert (free["name"], free["value"]) == ("free", 0.0), finished
