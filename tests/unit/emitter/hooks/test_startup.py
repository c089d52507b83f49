"""The hook at the start of a python, beside a torch that is only called so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tocsin.emitter.launch.options import HOOK_FOLDER
from tocsin.emitter.process.environment import RUN_ID


@pytest.mark.parametrize("before", ["enable", "disable"])
def test_the_collector_is_as_the_program_has_set_it(tmp_path: Path, before: str) -> None:
    (tmp_path / "torch.py").write_text("")
    code = f"import gc; gc.{before}(); import sys, torch; print(gc.isenabled())"
    code += "; print('tocsin.emitter.hooks.on_import' in sys.modules)"
    path = os.pathsep.join([str(HOOK_FOLDER), str(tmp_path)])
    environ = {**os.environ, RUN_ID: "r1", "PYTHONPATH": path}

    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )

    assert done.stdout == f"{before == 'enable'}\nTrue\n"
