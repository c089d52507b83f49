"""PyTorch Geometric's first example, a graph convolutional network, on a graph that is made here.

Four groups of nodes with more links inside than between them. `--nan-at K` puts NaN into a feature
of a node at epoch K.
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import stochastic_blockmodel_graph

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=200)
parser.add_argument("--nan-at", type=int, metavar="K")
arguments = parser.parse_args()

seed_everything(0)
GROUPS, SIZE, FEATURES = 4, 100, 32
between = torch.full((GROUPS, GROUPS), 0.005) + torch.eye(GROUPS) * 0.03
y = torch.arange(GROUPS).repeat_interleave(SIZE)
x = (torch.rand(GROUPS * SIZE, FEATURES) < 0.1).float()
x[torch.arange(len(y)), y] += (torch.rand(len(y)) < 0.5).float()
shuffled = torch.randperm(len(y))
train_mask = torch.zeros(len(y), dtype=torch.bool)
train_mask[shuffled[:80]] = True
data = Data(
    x=x,
    edge_index=stochastic_blockmodel_graph([SIZE] * GROUPS, between),
    y=y,
    train_mask=train_mask,
    test_mask=~train_mask,
)


class GCN(torch.nn.Module):
    """Two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = GCNConv(FEATURES, 16)
        self.conv2 = GCNConv(16, GROUPS)

    def forward(self, data: Data) -> torch.Tensor:
        """The logarithm of the probability of each group, for each node."""
        x, edge_index = data.x, data.edge_index
        x = self.conv1(x, edge_index)
        x = F.relu(x)
        x = F.dropout(x, training=self.training)
        x = self.conv2(x, edge_index)
        return F.log_softmax(x, dim=1)


model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(arguments.epochs):
    if epoch == arguments.nan_at:
        data.x[0, 0] = float("nan")
    model.train()
    optimizer.zero_grad()
    out = model(data)
    loss = F.nll_loss(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        pred = model(data).argmax(dim=1)
    correct = (pred[data.test_mask] == data.y[data.test_mask]).sum()
    acc = int(correct) / int(data.test_mask.sum())
    if epoch % 20 == 19:
        print(f"Epoch: {epoch + 1:03d}, Loss: {loss.item():.4f}, Test: {acc:.4f}", flush=True)
