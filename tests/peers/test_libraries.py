"""Training loops of other libraries under `tocsin run`, as their quick starts show them.

Each is left alone while it is healthy, and is stopped after one planted NaN.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.processes.site import Finished, embedded_site_in
from support.servers import libraries
from support.servers.receiver import Receiver, http_receiver

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).parent / "scripts"
WAIT_S = 240

_TIMES = re.compile(r"runtime|per_second|fps|time_elapsed|ms |MB/s|hours|[━─]")
"""Lines of the libraries that have times in them; a bar is drawn as often as there is time."""


@dataclass(frozen=True)
class Library:
    """One of the scripts.

    Attributes:
        steps: that the library makes by its own settings.
        nan_at: what the script is to spoil.
        exit_code: after that; PPO looks at its policy before each step, and raises by itself.
    """

    script: str
    steps: int
    nan_at: int
    arguments: tuple[str, ...] = ()
    exit_code: int = 79


LIBRARIES = {
    "TRL, SFT with LoRA": Library("trl_sft.py", steps=120, nan_at=60),
    "TRL, DPO": Library("trl_dpo.py", steps=100, nan_at=50),
    "timm": Library("timm_images.py", steps=192, nan_at=60),
    "sentence-transformers": Library("sentence_embeddings.py", steps=100, nan_at=50),
    "PyTorch Geometric": Library("pyg_gcn.py", steps=200, nan_at=60),
    # Of 512 timesteps each in 10 epochs of 8 batches: the loss rises by half while it learns.
    "stable-baselines3, PPO": Library("sb3_cartpole.py", 960, 700, ("ppo",), exit_code=1),
    # Each fourth timestep after the first 100.
    "stable-baselines3, DQN": Library("sb3_cartpole.py", 300, 700, ("dqn",)),
    # By its count of updates of the averaged weights; the batches of a step become two on the way.
    "ultralytics YOLO": Library("yolo_detect.py", steps=70, nan_at=60),
}

each_library = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


@pytest.fixture(scope="module")
def python() -> str:
    return str(libraries.python())


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with http_receiver() as receiver:
        yield receiver


def plain(python: str, library: Library, folder: Path) -> str:
    """What the script prints without tocsin; the test is skipped if its library is not there."""
    folder.mkdir()
    done = subprocess.run(
        [python, str(SCRIPTS / library.script), *library.arguments],
        cwd=folder,
        env={**os.environ, **libraries.environment(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    missing = re.findall(r"^(?:ImportError|ModuleNotFoundError): .*", done.stderr, re.MULTILINE)
    if done.returncode != 0 and missing:
        pytest.skip(missing[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def watched(
    python: str, library: Library, folder: Path, receiver: Receiver, *more: str
) -> Finished:
    folder.mkdir()
    site = embedded_site_in(folder, receiver)
    script = str(SCRIPTS / library.script)
    return site.run(
        python, script, *library.arguments, *more,
        environ=libraries.environment(folder), timeout_s=WAIT_S,
    )  # fmt: skip


def without_times(text: str, folder: Path) -> list[str]:
    """The lines that are the same each time, wherever it ran."""
    lines = text.replace(str(folder), "FOLDER").splitlines()
    return [line for line in lines if not _TIMES.search(line)]


@each_library
def test_a_healthy_training_is_watched_whole_and_left_alone(
    python: str, library: Library, tmp_path: Path, receiver: Receiver
) -> None:
    alone = plain(python, library, tmp_path / "plain")
    finished = watched(python, library, tmp_path / "watched", receiver)
    assert finished.exit_code == 0, finished
    assert finished.issues == [], finished
    assert finished.summary["steps"] == library.steps, finished
    assert f"{library.steps:,} steps watched" in finished.stderr, finished
    assert "NOT WATCHING" not in finished.stderr, finished
    capture = finished.summary["capture"]
    assert (capture["degraded"], capture["not_watched"], capture["dropped"]) == ([], [], 0)
    assert without_times(finished.stdout, tmp_path / "watched") == without_times(
        alone, tmp_path / "plain"
    )


@each_library
def test_a_nan_in_it_is_found_and_the_job_is_stopped(
    python: str, library: Library, tmp_path: Path, receiver: Receiver
) -> None:
    finished = watched(python, library, tmp_path / "bad", receiver, "--nan-at", str(library.nan_at))
    missing = re.search(r"^(?:ImportError|ModuleNotFoundError): .*", finished.stderr, re.MULTILINE)
    if finished.exit_code == 1 and missing:
        pytest.skip(missing[0])
    (issue,) = [one for one in finished.issues if one["rule"] == "nonfinite"]
    assert issue["severity"] == "critical"
    assert finished.exit_code == library.exit_code, finished
    if library.exit_code == 79:
        finished.stopped_by("nonfinite")
        assert finished.summary["steps"] < library.steps
