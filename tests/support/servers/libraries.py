"""The libraries whose training loops are watched in tests/peers, in one environment beside ours.

It is made once, in `~/.cache/tocsin`, with the torch that is here (some 600 MB without that);
`TOCSIN_TEST_LIBRARIES` names the interpreter of one that is there. Without either, tests that need
it are skipped and say why.
"""

from __future__ import annotations

import os
from pathlib import Path

from support.processes.children import STARTUP
from support.servers.own_environment import interpreter_beside

_REQUIREMENTS = (
    "trl==1.16.0", "peft==0.21.2", "datasets==5.2.0", "timm==1.0.31",
    "sentence-transformers==6.2.0", "torch-geometric==2.8.1", "stable-baselines3==2.9.2",
    "gymnasium==1.4.0",
    # The one that fits the torch that is here.
    "torchvision",
    # Of Ultralytics, which asks for the OpenCV that needs a display.
    "opencv-python-headless", "polars", "psutil", "requests",
)  # fmt: skip
_ALONE = ("ultralytics==8.4.190", "ultralytics-thop==2.2.3")


def python() -> Path:
    """The interpreter that has them."""
    return interpreter_beside("libraries", _REQUIREMENTS, _ALONE, "TOCSIN_TEST_LIBRARIES")


def environment(folder: Path) -> dict[str, str]:
    """Variables of a training in that folder: it fetches nothing, writes nothing elsewhere, and
    imports what it does for users (`support/processes/startup` leaves the compiler out)."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path != str(STARTUP)),
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "YOLO_CONFIG_DIR": str(folder / "ultralytics"),
        "YOLO_OFFLINE": "true",
    }
