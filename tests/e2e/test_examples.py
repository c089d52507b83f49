"""What stands in examples/ runs, and is left alone where it is healthy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.site import Site
from tocsin.console.setting import section_registry
from tocsin.schemas.config import check_config

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_plain_loop_is_healthy(embedded_site: Site) -> None:
    finished = embedded_site.run(sys.executable, str(EXAMPLES / "plain_loop.py"))
    assert finished.exit_code == 0, finished
    assert finished.summary["steps"] == 400
    assert finished.issues == [], finished


def test_the_plain_loop_with_a_wild_learning_rate_is_stopped(embedded_site: Site) -> None:
    script = str(EXAMPLES / "plain_loop.py")
    finished = embedded_site.run(
        sys.executable, script, "--learning-rate", "1e6", "--steps", "200000"
    )
    assert finished.exit_code == 79, finished


def test_the_python_interface_watches_without_a_launcher(embedded_site: Site) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "in_python.py")],
        cwd=embedded_site.folder,
        env={**os.environ, **embedded_site.environ, "TOCSIN_RUN_ID": "in-python"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    status = embedded_site.tocsin("status", "in-python", "--json")
    assert '"last_step": 399' in status.stdout, status.stdout + status.stderr + done.stderr


def test_the_configuration_is_valid() -> None:
    text = (EXAMPLES / "tocsin.yaml").read_text()
    _, problems = check_config(text, "tocsin.yaml", section_registry())
    assert problems == []
