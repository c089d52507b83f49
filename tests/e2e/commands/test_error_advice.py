"""Each mistake that a newcomer makes is answered by what was expected, or what to try."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from support.processes import forking
from tocsin.console.__main__ import main

NOBODY: Final = "kafka://127.0.0.1:1"
"""Port 1 of this machine: refused at once."""


@dataclass(frozen=True)
class Mistake:
    """A command line that is wrong, and what the answer to it holds."""

    line: str
    says: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.line or "nothing"


MISTAKES: Final = [
    Mistake("statsu", ["Did you mean 'status'"]),
    Mistake("bus inti", ["Did you mean 'init'"]),
    Mistake("run", ["tocsin run -- python train.py"]),
    Mistake("run --", ["tocsin run -- python train.py"]),
    Mistake("run --lable a=b -- true", ["--label"]),
    Mistake("run --label novalue -- true", ["expected key=value", "team=vision"]),
    Mistake("run --label =x -- true", ["label's key"]),
    Mistake("run --run-id a/b -- true", ["run id 'a/b'", "for example"]),
    Mistake("run --config none.yaml -- true", ["none.yaml", "`tocsin init` writes one"]),
    Mistake("run --config mixed.yaml -- true", ["try: - {name: stalled_training, params: …}"]),
    Mistake("check none.yaml", ["none.yaml", "`tocsin init` writes one"]),
    Mistake("run --drain soon -- true", ["--drain", "number"]),
    Mistake("run --summary no/x.json -- true", ["no folder", "create it, or name another"]),
    Mistake("run --summary . -- true", ["expected a file", "summary.json"]),
    Mistake("run --bus nonsense -- true", ["embedded:PATH or kafka://"]),
    Mistake("status", ["TOCSIN_BUS", "embedded:PATH or kafka://"], {"TOCSIN_BUS": "nonsense"}),
    Mistake("run -- true", ["TOCSIN_LABELS", "expected key=value"], {"TOCSIN_LABELS": "x"}),
    Mistake("rules", ["TOCSIN_LOG", "expected DEBUG, INFO"], {"TOCSIN_LOG": "loud"}),
    Mistake("rules --http 80", ["expected HOST:PORT", "127.0.0.1:9464"]),
    Mistake("actions --allow-cidr here", ["expected a network like 10.0.0.0/8"]),
    Mistake("status --bus embedded:none.db", ["no bus at", "'tocsin run' creates one"]),
    Mistake(f"status --bus {NOBODY}", ["no broker answers", "check that one is running"]),
    Mistake(f"bus init --bus {NOBODY}", ["no broker answers", "check that one is running"]),
    Mistake(f"demo nan --bus {NOBODY}", ["no broker answers", "check that one is running"]),
    Mistake(
        f"run --require-bus --bus {NOBODY} -- true",
        ["no broker answers", "check that one is running"],
    ),
    Mistake("run --notify hooks.example.com -- true", ["expected a webhook like https://"]),
    Mistake("run --notify slak://A/B/C -- true", ["slak:// is not one of those"]),
    Mistake("run --notify mailto:me -- true", ["expected a mail address like"]),
    Mistake(
        "run --notify mailto:me@example.com -- true",
        ["TOCSIN_SMTP", "smtp://USER:PASSWORD@HOST:PORT"],
        {"TOCSIN_SMTP": "mail.example.com"},
    ),
    Mistake("demo stal", ["'healthy', 'nan', 'diverge', 'stall'"]),
    Mistake("init no/tocsin.yaml", ["cannot write", "No such file or directory"]),
    Mistake("status nobody", ["no run 'nobody'", "`tocsin status` lists all"]),
    Mistake("issues nobody", ["no run 'nobody'", "`tocsin status` lists all"]),
    Mistake("why nothing", ["`tocsin issues` lists"]),
    Mistake("why", ["Missing argument 'ISSUE'", "tocsin why --help"]),
    Mistake("stop nobody --reason x", ["no run 'nobody'", "`tocsin status` lists all"]),
    Mistake("stop nobody", ["Missing option '--reason'"]),
    # Bytes that are no UTF-8 come as surrogates.
    Mistake("status \udcff", ["run id '\\udcff': expected 1 to 200 letters", "for example"]),
    Mistake("issues \udcff", ["run id '\\udcff': expected 1 to 200 letters", "for example"]),
    Mistake("why \udcff", ["'\\udcff': expected the id of an issue", "`tocsin issues` lists"]),
    Mistake("stop \udcff --reason x", ["run id '\\udcff': expected 1 to 200 letters"]),
    Mistake("watch --once \udcff", ["run id '\\udcff': expected 1 to 200 letters"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one run could not begin, and another ended: with a bus, without a configuration."""
    folder = tmp_path_factory.mktemp("mistakes")
    mixed = "version: 1\nrules:\n  - stalled_training:\n      params: {threshold: 5s}\n"
    (folder / "mixed.yaml").write_text(mixed)
    with pytest.MonkeyPatch.context() as patch:
        _enter(folder, patch, {})
        # In a process of its own: a launcher takes over the signals and orphans of its process.
        words = [sys.executable, "-m", "tocsin.console", "run", "--"]
        done = forking.run([*words, "nosuchprogram"], timeout=60)
        assert forking.run([*words, "true"], timeout=60).returncode == 0
    assert done.returncode == 127
    assert "nosuchprogram: not found on PATH: expected a program" in done.stderr
    return folder


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_answered_by_what_to_do(
    mistake: Mistake, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _enter(folder, monkeypatch, mistake.environ)
    code, said = _tocsin(mistake.line)
    assert code == 2, said
    for part in mistake.says:
        assert part in " ".join(said.split()), said
    assert "Traceback" not in said
    # Nothing but sentences of ours: no library's own words before them.
    assert all(line.startswith(("tocsin: ", "Usage: ", "Try ", "Error: ")) for line in _lines(said))


def _lines(said: str) -> list[str]:
    """What was said by us, without log lines of workers."""
    return [line for line in said.splitlines() if line.strip() and not line.startswith("2")]


def _enter(folder: Path, patch: pytest.MonkeyPatch, environ: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("TOCSIN_")]:
        patch.delenv(name)
    for name, value in {"XDG_CONFIG_HOME": str(folder / "config"), **environ}.items():
        patch.setenv(name, value)
    patch.chdir(folder)


def _tocsin(line: str) -> tuple[int, str]:
    """Run a command line as the console script does; its exit code and what it wrote to stderr."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr("sys.argv", ["tocsin", *line.split()])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0), said.getvalue()
