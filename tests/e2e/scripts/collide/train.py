"""A training whose own modules are called as ours: schemas, actions, bus, and a sitecustomize.

Run it from its own folder or with the folder on PYTHONPATH (for the sitecustomize). It asserts
that it got its own modules, trains, prints what it imported, and raises an exception if asked.
"""

import sys
from pathlib import Path

import actions
import bus
import schemas
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
here = Path(__file__).resolve().parent
for module in (actions, bus, schemas):
    assert module.__file__ is not None
    assert here in Path(module.__file__).resolve().parents, module.__file__

model = torch.nn.Linear(schemas.FEATURES, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    loss = model(bus.next_batch()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    actions.report(step, loss.item())
own = sys.modules.get("sitecustomize")
print("user sitecustomize ran:", "user_sitecustomize_marker" in sys.__dict__)
print("sitecustomize module:", getattr(own, "__file__", None), file=sys.stderr)
if sys.argv[1:] == ["--raise"]:
    raise RuntimeError("the user's own mistake")
