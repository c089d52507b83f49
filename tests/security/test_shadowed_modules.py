"""Modules of the user's project that are called as modules we need: none of our processes takes
them, and the job takes all of them, as without us.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes.children import startup_environ
from tocsin.schemas.configuration.sections import RuleEntry
from tocsin.schemas.process.own_python import LEFT_OUT, python_command, python_environment
from tocsin.stream_rules.custom.host import load_apart

ROOT = Path(__file__).resolve().parents[2]
TORTURE = pytest.mark.torture
RAISES = "raise RuntimeError('a module of the project was imported')\n"

NAN_AT_20 = """
import os, time
if startup := os.environ.get("STARTUP_OF_TESTS"):
    exec(open(startup).read(), {"__name__": "startup", "__file__": startup})
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20_000):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    if step == 20:
        model.weight.grad[0, 0] = float("nan")
    optimizer.step()
    time.sleep(0.005)
"""


def project(folder: Path, *names: str) -> Path:
    """A folder with modules that cannot be imported."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.py").write_text(RAISES)
    return folder


@pytest.mark.parametrize("started", ["command", pytest.param("module", marks=TORTURE)])
def test_a_run_in_such_a_project_is_watched_and_stopped(tmp_path: Path, started: str) -> None:
    here = project(tmp_path / "here", "statistics", "secrets", "yaml", "json", "sitecustomize")
    if started == "command":
        # Python itself is lost if it finds this one where it looks first.
        project(here, "typing")
    elsewhere = project(tmp_path / "elsewhere", "yaml", "rich", "typer", "sitecustomize")
    (here / "jobs").mkdir()
    (here / "jobs" / "train.py").write_text(NAN_AT_20)
    summary = tmp_path / "summary.json"
    start = {"command": ("-P", "-m"), "module": ("-m",)}[started]
    ended = subprocess.run(
        [
            *(sys.executable, *start, "tocsin.console", "run", "--summary", str(summary)),
            *("--", sys.executable, "jobs/train.py"),
        ],
        cwd=here,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("TOCSIN_")},
            "PYTHONPATH": str(elsewhere),
            "XDG_CONFIG_HOME": str(tmp_path / "config"),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "error",
            **startup_environ(),
        },
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 79, ended.stderr
    told = json.loads(summary.read_text())
    assert (told["outcome"], told["stop"]["rule"]) == ("stopped", "nonfinite"), told
    assert "restarting it" not in ended.stderr


def test_of_the_user_s_path_only_installed_packages_are_kept(tmp_path: Path) -> None:
    mine = project(tmp_path / "mine", "sitecustomize", "usercustomize", "yaml")
    packages = tmp_path / "packages"
    (packages / "some-1.0.dist-info").mkdir(parents=True)
    clone = ROOT / "schemas"
    given = os.pathsep.join(["", str(mine), str(packages), str(clone)])

    environ = python_environment({"PYTHONPATH": given, "PYTHONWARNINGS": "error", "HOME": "/x"})

    kept = os.pathsep.join([str(packages), str(clone)])
    left = os.pathsep.join([os.getcwd(), str(mine)])
    assert environ == {"PYTHONPATH": kept, LEFT_OUT: left, "HOME": "/x"}
    assert python_environment(environ) == environ
    assert python_environment({"PYTHONPATH": ""}) == {}


def test_neither_the_working_folder_nor_the_user_s_path_is_looked_at(tmp_path: Path) -> None:
    here = project(tmp_path / "here", "timeit", "sitecustomize", "usercustomize")
    ended = subprocess.run(
        [*python_command("timeit"), "-n", "1", "-r", "1", "import sys; print(sys.path)"],
        cwd=here,
        env=python_environment({**os.environ, "PYTHONPATH": os.pathsep.join(["", str(here)])}),
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert str(here) not in ended.stdout


def test_custom_rules_find_the_user_s_modules_and_no_other_in_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = project(tmp_path / "mine", "statistics", "yaml")
    (mine / "my_numbers.py").write_text("WORD = 'found'\n")
    (tmp_path / "rule.py").write_text(
        "import my_numbers, statistics, yaml\n"
        "assert statistics.median([1]) == 1\n"
        "raise RuntimeError(my_numbers.WORD)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(mine))
    loaded = load_apart([RuleEntry(name="mine", use="rule.py:Mine")], folder=tmp_path)
    (problem,) = loaded.problems
    assert "RuntimeError: found (line 3)" in problem.message


def test_every_python_of_ours_is_started_so() -> None:
    """Whoever names the interpreter starts it by himself, past `python_command`."""
    found = []
    for portion in (
        "schemas",
        "bus",
        "runtime",
        "emitter",
        "stream_rules",
        "actions",
        "store",
        "console",
    ):
        for path in sorted((ROOT / portion / "tocsin").rglob("*.py")):
            if "executable" not in (text := path.read_text()):
                continue
            tree = ast.walk(ast.parse(text))
            named = (node.attr for node in tree if isinstance(node, ast.Attribute))
            if "executable" in named:
                found.append(path.name)
    # The second one says which Python has no tocsin.
    assert found == ["own_python.py", "sitecustomize.py"]
