"""A training of no framework that tocsin knows: it logs its loss itself, and needs no torch.

`--nan-at K` makes the loss NaN from step K on; `--exit N` ends it with that code.
"""

import argparse
import sys
import time

from tocsin.emitter import start

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--nan-at", type=int)
parser.add_argument("--exit", type=int, default=0)
arguments = parser.parse_args()

with start() as run:
    for step in range(arguments.steps):
        time.sleep(0.01)
        bad = arguments.nan_at is not None and step >= arguments.nan_at
        run.log({"loss": float("nan") if bad else 2 / (step + 1)}, step=step)
print("torch" in sys.modules)
sys.exit(arguments.exit)
