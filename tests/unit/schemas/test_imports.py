"""What an import of `tocsin.schemas` costs."""

from __future__ import annotations

import subprocess
import sys


def test_the_errors_alone_cost_no_numpy() -> None:
    code = (
        "import sys, tocsin.schemas.errors, tocsin.schemas.topics;"
        "sys.exit(any(name in sys.modules for name in ('numpy', 'pydantic', 'cryptography')))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
