"""A small network of convolutions learns which half of an image is bright; one fault if asked.

`--fault nan_batch` puts NaN into one image of step `--fault-at`, `diverge` multiplies the learning
rate by 10,000 there, and `stall` waits for ever instead of reading the batch. A step takes about
ten milliseconds, and fifty when the fault is over, so a stop comes long before the last one. Run
with and without tocsin: stdout, exit code and weights must be the same.
"""

import argparse
import hashlib
import threading
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3_000)
parser.add_argument("--fault", choices=["nan_batch", "diverge", "stall"])
parser.add_argument("--fault-at", type=int, default=25, metavar="K")
arguments = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3, padding=1),
    torch.nn.BatchNorm2d(8),
    torch.nn.ReLU(),
    torch.nn.Conv2d(8, 8, 3, stride=2, padding=1),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(128, 2),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(arguments.steps):
    fault = arguments.fault if step == arguments.fault_at else None
    if fault == "stall":
        threading.Event().wait()
    labels = torch.randint(2, (32,))
    images = torch.randn(32, 1, 8, 8)
    images[labels == 0, :, :4] += 0.3
    images[labels == 1, :, 4:] += 0.3
    if fault == "nan_batch":
        images[0] = float("nan")
    if fault == "diverge":
        optimizer.param_groups[0]["lr"] *= 10_000
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    time.sleep(0.05 if arguments.fault and step > arguments.fault_at + 20 else 0.008)
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print("weights sha256", hashlib.sha256(weights).hexdigest())
print(f"done after {arguments.steps} steps", flush=True)
