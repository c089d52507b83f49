"""The Helm chart of `deploy/`, rendered by the real `helm`, and the other tools of an operator.

`tools/setup-peers` installs them; they are looked for in PATH and in ~/.cache/tocsin/bin.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

CHART: Final = Path(__file__).parents[3] / "deploy" / "helm" / "tocsin"
RELEASE: Final = "watch"
EVERYTHING: Final = (
    "secrets={hook}", "topics.replication=3", "topics.apply=true", "actions.replicas=2",
    "actions.keySecret=stop-key", "actions.allowCidr={10.0.0.0/8}", "archive.enabled=true",
    "page.enabled=true", "page.tokenSecret=page-token", "page.keySecret=page-key",
    "page.hostNames={tocsin.example.com}",
)  # fmt: skip
"""Values with which nothing of the chart is left out."""


def tool(name: str) -> str:
    """Where a program is. Skips the test if it is nowhere."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = shutil.which(name) or shutil.which(name, path=cache / "tocsin/bin")
    if found is None:
        pytest.skip(f"{name} is not installed: tools/setup-peers")
    return found


def template(*values: str) -> subprocess.CompletedProcess[str]:
    """`helm template` with these values."""
    words = [tool("helm"), "template", RELEASE, str(CHART)]
    for value in values:
        words += ["--set", value]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def manifests(*values: str) -> list[dict[str, Any]]:
    """The objects that the chart makes of these values."""
    done = template(*values)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one is not None]
