"""Ultralytics YOLO from scratch: the smallest network learns to find squares and discs.

The images are made here. `--nan-at K` puts NaN into a weight before batch K.
"""

import argparse
import itertools
import math
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from ultralytics import YOLO

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=16)
parser.add_argument("--nan-at", type=int, metavar="K")
arguments = parser.parse_args()

SIZE = 64
random = np.random.default_rng(0)


def example(images: Path, labels: Path, name: str) -> None:
    """One image with a square or a disc, and the box around it."""
    image = random.integers(0, 60, (SIZE, SIZE, 3), dtype=np.uint8)
    kind = int(random.integers(2))
    half = int(random.integers(8, 16))
    x, y = (int(v) for v in random.integers(half, SIZE - half, 2))
    colour = tuple(int(v) for v in random.integers(120, 256, 3))
    if kind == 0:
        cv2.rectangle(image, (x - half, y - half), (x + half, y + half), colour, -1)
    else:
        cv2.circle(image, (x, y), half, colour, -1)
    cv2.imwrite(str(images / f"{name}.png"), image)
    box = f"{x / SIZE} {y / SIZE} {2 * half / SIZE} {2 * half / SIZE}"
    (labels / f"{name}.txt").write_text(f"{kind} {box}\n")


folder = Path("shapes").resolve()
for part, count in (("train", 64), ("val", 16)):
    images, labels = folder / "images" / part, folder / "labels" / part
    images.mkdir(parents=True)
    labels.mkdir(parents=True)
    for i in range(count):
        example(images, labels, f"{i:03}")
data = folder / "shapes.yaml"
data.write_text(
    f"path: {folder}\ntrain: images/train\nval: images/val\nnames: {{0: square, 1: disc}}\n"
)
model = YOLO("yolov8n.yaml")
batches = itertools.count()


def spoil(trainer: Any) -> None:
    """Called by the trainer before each batch."""
    if next(batches) == arguments.nan_at:
        next(trainer.model.parameters()).data.fill_(math.nan)


model.add_callback("on_train_batch_start", spoil)
model.train(
    data=str(data), epochs=arguments.epochs, imgsz=SIZE, batch=8, nbs=16, workers=0, seed=0,
    optimizer="SGD", device="cpu", plots=False,
    project=str(folder / "runs"),
)  # fmt: skip
print("updates of the average of the weights:", model.trainer.ema.updates)
