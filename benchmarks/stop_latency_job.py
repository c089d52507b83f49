"""The job of `benchmarks/stop_latency.py`: trains the demo's GPT again and again, each in a child.

    python benchmarks/stop_latency_job.py STOPS

It imports everything once, then forks a child for each training, which gets a NaN in a gradient and
is stopped. For each it prints a line of JSON: when the gradient became NaN, when the loop was left
and when the process was gone, by one clock (Unix, seconds), and the steps. The next training begins
only when the one before is gone, as if the job had been started anew.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from contextlib import redirect_stdout

import torch._dynamo
import torch.distributed  # noqa: F401  (the emitter asks for it; it is slow to import)

from tocsin.console.demo.trainings import gpt
from tocsin.emitter import StopTraining, start

FAULT_AT = 40
STEPS = 2000
_TIME = re.compile(r"^(fault|left).* step (\d+).*\[unix time ([0-9.]+) s\]", re.MULTILINE)


def train(number: int) -> str:
    """Train until a stop; a line about it."""
    run = start()
    out = io.StringIO()
    words = ["--threads", "1", "--times", "--steps", str(STEPS), "--seed", str(number)]
    words += ["--fault", "nan_gradient", "--fault-at", str(FAULT_AT)]
    try:
        with redirect_stdout(out):
            gpt.main(words)
    except StopTraining:
        pass
    found = {kind: (int(step), float(at)) for kind, step, at in _TIME.findall(out.getvalue())}
    training = run._session.training
    line = {
        "incarnation": "" if training is None else training.origin.incarnation,
        "fault_s": found["fault"][1],
        "left_s": found["left"][1],
        "steps": found["left"][0] - found["fault"][0],
    }
    run.finish("stopped")
    return json.dumps(line)


def main() -> None:
    """Fork the trainings, one after the other."""
    for number in range(int(sys.argv[1])):
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.close(reading)
                with os.fdopen(writing, "w") as pipe:
                    pipe.write(train(number))
                code = 79
            finally:
                os._exit(code)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        os.waitpid(pid, 0)
        gone_s = time.time()
        if not text:
            raise SystemExit(f"training {number} was not stopped")
        print(json.dumps({**json.loads(text), "gone_s": gone_s}), flush=True)


if __name__ == "__main__":
    main()
