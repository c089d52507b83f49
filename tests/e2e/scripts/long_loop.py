"""Trains until it is stopped, at about 100 steps a second; SIGINT and SIGTERM are not caught.

Prints its pid first and then every tenth step, flushed, so a test can wait for a line before it
sends a signal. `--steps N` ends it by itself; `--on-term N` makes SIGTERM leave with code N after
the step in progress, as scripts do that save a last checkpoint.
"""

import argparse
import os
import signal
import sys
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--on-term", type=int, metavar="N")
arguments = parser.parse_args()

terminated = False


def _terminate(_number: int, _frame: object) -> None:
    global terminated
    terminated = True


if arguments.on_term is not None:
    signal.signal(signal.SIGTERM, _terminate)
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print(f"pid {os.getpid()}", flush=True)
for step in range(arguments.steps):
    inputs = torch.randn(64, 8)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if terminated:
        print(f"SIGTERM seen, leaving after step {step}", flush=True)
        sys.exit(arguments.on_term)
    time.sleep(0.01)
print(f"done after {arguments.steps} steps", flush=True)
