"""Networks on graphs with PyTorch Geometric: pooling by graph, attention, and products with a CSR matrix."""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATv2Conv, GCNConv, GINConv, SAGEConv, global_mean_pool
from torch_geometric.utils import to_torch_csr_tensor


class Pooled(nn.Module):
    """Classifies whole graphs; how many there are is a value of ``batch``, or known before."""

    def __init__(self, size=None):
        super().__init__()
        self.size = size
        self.first, self.second = GCNConv(8, 32), GATv2Conv(32, 16, heads=2)
        self.third = GINConv(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)))
        self.head = nn.Linear(32, 2)

    def forward(self, x, edges, batch):
        for layer in (self.first, self.second, self.third):
            x = F.relu(layer(x, edges))
        return self.head(global_mean_pool(x, batch, self.size))


class Nodes(nn.Module):
    """Classifies the nodes of one graph, whose edges are a sparse matrix."""

    def __init__(self):
        super().__init__()
        self.first, self.second = SAGEConv(8, 32), SAGEConv(32, 2)

    def forward(self, x, matrix):
        return self.second(F.relu(self.first(x, matrix)), matrix)


def graph(generator, nodes):
    """Returns a graph whose class says whether its mean feature is positive."""
    x = torch.randn(nodes, 8, generator=generator)
    edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
    return Data(x=x, edge_index=edges, y=(x.mean() > 0).long().view(1))


def pooled(size=None):
    network = Pooled(size)

    def loss(step):
        generator = torch.Generator().manual_seed(step)
        sizes = torch.randint(5, 15, (16,), generator=generator).tolist()
        batch = Batch.from_data_list([graph(generator, nodes) for nodes in sizes])
        return lambda model: F.cross_entropy(model(batch.x, batch.edge_index, batch.batch), batch.y)

    return network, loss


def csr():
    network = Nodes()
    data = graph(torch.Generator().manual_seed(0), 200)
    matrix, labels = to_torch_csr_tensor(data.edge_index, size=(200, 200)), (data.x.sum(1) > 0).long()
    return network, lambda step: lambda model: F.cross_entropy(model(data.x, matrix), labels)


CASES = {"pooling by graph": pooled, "pooling with size": lambda: pooled(16), "CSR matrix": csr}


def main(steps=20, case="pooling by graph"):
    torch.manual_seed(2)
    model, loss_of = CASES[case]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = loss_of(step)(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for case in CASES:
        print(f"{case}: the loss is {main(case=case)[-1]:.3f}")
