"""Scripts as users write them, run with the hook on PYTHONPATH: what they see, and what we see."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes.children import python_path
from support.trainings.captured import HOOK, run_with_hook, said
from tocsin.schemas.records.runs import RunEnded, RunStarted

LOOP = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    loss = model(torch.randn(3, 4)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(model.weight.sum().item(), torch.randn(1).item())
"""


def python(folder: Path, code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TOCSIN_", "PYTHONPATH"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": str(HOOK), **environ},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.torture
def test_a_plain_script_is_captured_and_prints_the_same(tmp_path: Path) -> None:
    plain = run_with_hook(tmp_path, LOOP, TOCSIN_RUN_ID="")
    watched = run_with_hook(tmp_path, LOOP, TOCSIN_LABELS="a=b")
    assert (watched.returncode, watched.stdout, watched.stderr) == (0, plain.stdout, "")
    found = said(tmp_path)
    assert sorted(found.steps()) == list(range(6))
    (started,), (ended,) = found.of(RunStarted), found.of(RunEnded)
    assert started.command.endswith("train.py")
    assert started.labels == {"a": "b"}
    assert (ended.outcome, ended.last_step) == ("completed", 5)


@pytest.mark.torture
def test_own_modules_and_sitecustomize_of_the_user_still_work(tmp_path: Path) -> None:
    for name in ("schemas", "actions", "bus"):
        (tmp_path / f"{name}.py").write_text(f"MINE = {name!r}\n")
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import os\nos.environ['SITE'] = __file__\n")
    script = LOOP + "import schemas, actions, bus, os, sitecustomize\n"
    script += "assert schemas.MINE + actions.MINE + bus.MINE == 'schemasactionsbus'\n"
    script += "assert os.environ['SITE'] == sitecustomize.__file__\n"
    done = run_with_hook(tmp_path, script, PYTHONPATH=f"{HOOK}{os.pathsep}{site}")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(said(tmp_path).steps()) == 6


@pytest.mark.torture
def test_an_exception_is_told_and_keeps_its_exit_code(tmp_path: Path) -> None:
    done = run_with_hook(tmp_path, LOOP + "raise ValueError('secret text')\n")
    assert done.returncode == 1
    assert "ValueError: secret text" in done.stderr
    (ended,) = said(tmp_path).of(RunEnded)
    assert (ended.outcome, ended.reason) == ("failed", "ValueError")


def test_sys_exit_keeps_its_code_and_the_last_records(tmp_path: Path) -> None:
    compilers = "[m for m in ('torch._dynamo', 'torch._inductor', 'triton') if m in sys.modules]"
    done = run_with_hook(tmp_path, LOOP + f"import sys\nprint({compilers})\nsys.exit(3)\n")
    assert done.returncode == 3
    # torch's own import of its compiler is put off in tests, so that one of ours would be seen.
    assert done.stdout.splitlines()[-1] == "[]"
    found = said(tmp_path)
    assert max(found.steps()) == 5
    assert len(found.of(RunEnded)) == 1


def test_a_python_without_torch_imports_nothing_of_ours(tmp_path: Path) -> None:
    code = "import sys, json; print(json.dumps([m for m in sys.modules if 'tocsin' in m]))"
    done = python(tmp_path, code, TOCSIN_RUN_ID="r1")
    # The editable install itself brings a .pth file; the package is not imported.
    assert [m for m in json.loads(done.stdout) if m.startswith("tocsin")] == []
    assert done.stderr == ""


def test_the_launcher_hears_of_each_python(tmp_path: Path) -> None:
    path = tmp_path / "l.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(path))
        ear.settimeout(5)
        code = "import os; print(os.getpid())"
        done = python(tmp_path, code, TOCSIN_RUN_ID="r1", TOCSIN_LAUNCHER=str(path))
        hello = json.loads(ear.recv(1000))
    assert hello == {"kind": "hello", "role": "python", "pid": int(done.stdout)}


def test_a_launcher_that_is_gone_is_no_matter(tmp_path: Path) -> None:
    done = python(tmp_path, "print(1)", TOCSIN_RUN_ID="r1", TOCSIN_LAUNCHER="/nowhere/l.sock")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_the_hook_costs_a_few_milliseconds(tmp_path: Path) -> None:
    code = f"""
import os, sys, time
os.environ["TOCSIN_RUN_ID"] = "r1"
os.environ["TOCSIN_LAUNCHER"] = "/nowhere/l.sock"
sys.modules.pop("sitecustomize", None)
sys.path.insert(0, {str(HOOK)!r})
began = time.process_time()
import sitecustomize
print(time.process_time() - began)
"""
    times = [float(python(tmp_path, code, PYTHONPATH="").stdout) for _ in range(7)]
    assert statistics.median(times) < 0.005, times


def test_a_torch_without_tocsin_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("value = 7\n")
    code = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tocsin":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Gone())
import torch
print(torch.value)
"""
    done = python(tmp_path, code, TOCSIN_RUN_ID="r1", PYTHONPATH=f"{HOOK}{os.pathsep}{tmp_path}")
    assert done.stdout == "7\n"
    assert "has torch but not tocsin" in done.stderr
    assert f"{sys.executable} -m pip install .\n" in done.stderr
    assert done.stderr.count("\n") == 1
    silent = python(
        tmp_path,
        code.replace("import torch", "sys.stderr = None\nimport torch"),
        TOCSIN_RUN_ID="r1",
        PYTHONPATH=f"{HOOK}{os.pathsep}{tmp_path}",
    )
    assert (silent.returncode, silent.stdout) == (0, "7\n")


def test_a_spawned_child_without_a_launcher_is_left_alone_and_named(tmp_path: Path) -> None:
    script = """
import multiprocessing

def child():
    import torch
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    print(process.exitcode)
"""
    done = run_with_hook(tmp_path, script)
    assert (done.returncode, done.stdout) == (0, "0\n")
    line = "tocsin: a child process trains and is not watched; try tocsin.emitter.start() in it"
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "bus.db").exists()


DDP = """
import torch, sys
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x = torch.randn(3, 4)
    if rank == 1 and step == 2:
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.torture  # torchrun in test_faults names the rank from the same records
@pytest.mark.timeout(180)
def test_only_the_rank_with_the_bad_batch_names_local_gradients(tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    runner = "import runpy, sys; sys.argv = ['torchrun', '--standalone', '--nproc-per-node', '2',"
    runner += " 'ddp.py']; runpy.run_module('torch.distributed.run', run_name='__main__')"
    done = python(
        tmp_path,
        runner,
        TOCSIN_RUN_ID="r1",
        TOCSIN_JOB_ID="j1",
        TOCSIN_BUS=f"embedded:{tmp_path}/bus.db",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    found = said(tmp_path)
    assert sorted(s.rank for s in found.of(RunStarted)) == [0, 1]
    assert len({s.incarnation for s in found.of(RunStarted)}) == 1
    local = [f for f in found.frames if f.collection == "local_gradients"]
    assert {f.origin.rank for f in local if f.step == 2} == {1}
    (first,) = [f for f in local if f.step == 2]
    assert set(first.rows) == {"weight", "bias"}
    bad = [f.origin.rank for f in found.frames if f.collection == "gradients" and f.step == 2]
    assert sorted(bad) == [0, 1]


def test_start_in_a_plain_script(tmp_path: Path) -> None:
    script = """
from tocsin.emitter import start
run = start("r1", labels={"a": "b"}, services=False)
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(3, 4)).pow(2).mean().backward()
    optimizer.step()
    run.log({"accuracy": step / 4})
with run.phase("evaluation"):
    pass
run.record("scores", torch.tensor([1.0, float("nan")]), kind="scores")
run.finish()
"""
    done = run_with_hook(
        tmp_path, script, PYTHONPATH=python_path(), TOCSIN_RUN_ID="", TOCSIN_JOB_ID=""
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = said(tmp_path)
    assert found.steps()[3]["log.accuracy"] == 0.75
    assert "loss" in found.steps()[3]
    assert found.frame("scores", 3).counts[0].tolist() == [2, 0, 1, 0]
    assert found.of(RunStarted)[0].labels == {"a": "b"}
    assert len(found.of(RunEnded)) == 1


def test_start_without_torch(tmp_path: Path) -> None:
    script = """
from tocsin.emitter import start
with start("r1", services=False) as run:
    for step in range(5):
        run.log({"loss": 1.0 / (step + 1), "accuracy": 0.5})
"""
    done = run_with_hook(tmp_path, script, PYTHONPATH="", TOCSIN_RUN_ID="", TOCSIN_JOB_ID="")
    assert (done.returncode, done.stderr) == (0, "")
    steps = said(tmp_path).steps()
    assert sorted(steps) == [0, 1, 2, 3, 4]
    assert steps[4]["loss"] == pytest.approx(0.2)


def test_wrong_arguments_are_configuration_errors(tmp_path: Path) -> None:
    calls = (
        'start("a b")',
        'start(labels={1: "x"})',
        'run.log({"x": "y"})',
        'run.log({"x": 1}, step=-1)',
        'run.record("x", ["a"])',
    )
    script = f"""
from tocsin.emitter import start
from tocsin.schemas.errors import ConfigurationError
for call in {calls}:
    if call.startswith("run."):
        run = start(services=False)
    try:
        eval(call)
    except ConfigurationError as error:
        print("configuration", error)
        continue
    print("taken:", call)
"""
    done = run_with_hook(tmp_path, script, PYTHONPATH="", TOCSIN_RUN_ID="", TOCSIN_JOB_ID="")
    said = done.stdout.splitlines()
    assert [line.split()[0] for line in said] == ["configuration"] * len(calls), done
