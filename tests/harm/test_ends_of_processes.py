"""However a process ends in the middle of a step, it ends as without us, and soon."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.trainings.captured import HOOK, environment, said
from tocsin.schemas.records.runs import RunEnded

TRAINING = """
import resource, signal, sys, threading, time
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())

def step():
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()

def digest():
    return [float(p.double().sum()) for p in model.parameters()]
"""

ENDS = {
    # The end of the interpreter stops it somewhere in a step; torch's answer to that is to abort.
    "while a thread trains": """
steps = []
def forever():
    while True:
        step()
        steps.append(1)
threading.Thread(target=forever, daemon=True).start()
while len(steps) < 30:
    time.sleep(0.01)
print("over")
""",
    "sys.exit in a forward call": """
def leave(module, inputs, output):
    if leave.calls == 12:
        sys.exit(3)
    leave.calls += 1
leave.calls = 0
model[1].register_forward_hook(leave)
while True:
    step()
""",
    "an exception in a backward call": """
calls = []
def fail(gradient):
    calls.append(1)
    if len(calls) == 12:
        raise ValueError("the user's own")
model[2].weight.register_hook(fail)
while True:
    step()
""",
    "an interrupt in a step": """
calls = []
def interrupt(optimizer, args, kwargs):
    calls.append(1)
    if len(calls) == 12:
        signal.raise_signal(signal.SIGINT)
optimizer.register_step_pre_hook(interrupt)
while True:
    step()
""",
    "no memory is left": """
for _ in range(12):
    step()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), -1))
for _ in range(60):
    step()
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
print(digest())
""",
}


def run(folder: Path, text: str, *, watched: bool) -> tuple[int, str, str, float]:
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(text)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TOCSIN_", "PYTHONPATH"))}
    path = os.environ.get("PYTHONPATH", "")
    environ = {**kept, "OMP_NUM_THREADS": "1"}
    if watched:
        given = os.pathsep.join(filter(None, (str(HOOK), path)))
        environ |= environment(folder, PYTHONPATH=given)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environ, cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr, time.monotonic() - began


@pytest.mark.torture
@pytest.mark.parametrize("end", list(ENDS))
def test_a_process_ends_as_without_us(tmp_path: Path, end: str) -> None:
    text = TRAINING + ENDS[end]
    plain = run(tmp_path / "plain", text, watched=False)
    watched = run(tmp_path / "watched", text, watched=True)
    assert watched[:2] == plain[:2], watched
    assert watched[2].splitlines()[-1:] == plain[2].splitlines()[-1:]
    found = said(tmp_path / "watched")
    (ended,) = found.of(RunEnded)
    assert len(found.steps()) >= 10
    if end != "while a thread trains":
        assert (ended.outcome == "completed") == (watched[0] == 0)
