"""One training that runs a block of steps each time it is told to; driven by `step_time.py`.

Reads a line with a number of steps, trains that many, and prints the wall seconds and the CPU
seconds (of this process) that they took; between lines it is idle. The models are those of the demo
in their benchmark size.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch.nn import functional

from tocsin.console.trainings import gpt, resnet


def main() -> None:
    """Train blocks until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["gpt", "resnet"])
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.model == "gpt":
        size = gpt.SIZES["bench"]
        model = gpt.Gpt(size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        data = gpt.batches(gpt.text_tokens(size.vocabulary), size, seed=0)
    else:
        wide = resnet.SIZES["bench"]
        model = resnet.ResNet(wide)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        images, labels = resnet.digits(channels=wide.channels, pixels=wide.pixels)
        data = resnet.batches(images, labels, batch=wide.batch, seed=0)
    print("ready", flush=True)
    for line in sys.stdin:
        begun, cpu = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            inputs, targets = next(data)
            outputs = model(inputs)
            loss = functional.cross_entropy(
                outputs.reshape(-1, outputs.shape[-1]), targets.flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()  # most loops print or sum it
        print(time.perf_counter() - begun, time.process_time() - cpu, flush=True)


if __name__ == "__main__":
    main()
