"""A graph convolutional network that classifies the nodes of one graph.

manner = "pytorch/examples, gcn"

[[fault]]
name = "functional dropout without training=self.training"
old = "F.dropout(x, self.p, training=self.training)"
new = "F.dropout(x, self.p)"
codes = ["RCP820"]
where = "F.dropout("
"""
import torch
import torch.nn.functional as F
from _report import report
from torch import nn, optim


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, x, adjacency):
        return torch.mm(adjacency, torch.mm(x, self.kernel)) + self.bias


class GCN(nn.Module):
    def __init__(self, inputs, hidden, classes, p=0.4):
        super().__init__()
        self.gc1 = GraphConv(inputs, hidden)
        self.gc2 = GraphConv(hidden, classes)
        self.p = p

    def forward(self, x, adjacency):
        x = F.relu(self.gc1(x, adjacency))
        x = F.dropout(x, self.p, training=self.training)
        return F.log_softmax(self.gc2(x, adjacency), dim=1)


def citations(nodes=400, classes=5, words=60):
    """Papers of one field cite each other more often and share some of their words."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, (nodes,), generator=generator)
    same = labels[:, None] == labels[None, :]
    edges = torch.rand(nodes, nodes, generator=generator) < torch.where(same, 0.03, 0.004)
    adjacency = ((edges | edges.T).float() + torch.eye(nodes)).clamp(max=1)
    scale = adjacency.sum(1).rsqrt()
    topics = torch.rand(classes, words, generator=generator) ** 3
    features = (torch.rand(nodes, words, generator=generator) < 0.3 * topics[labels]).float()
    features = features / features.sum(1, keepdim=True).clamp(min=1)
    return features, labels, scale[:, None] * adjacency * scale[None, :]


def main():
    torch.manual_seed(42)
    features, labels, adjacency = citations()
    order = torch.randperm(len(labels))
    idx_train, idx_val, idx_test = order[:150], order[150:250], order[250:]
    model = GCN(features.size(1), 16, 5)
    optimizer = optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    criterion = nn.NLLLoss()
    losses = []

    def test(idx):
        model.eval()
        with torch.no_grad():
            output = model(features, adjacency)
            loss = criterion(output[idx], labels[idx])
            accuracy = (output[idx].argmax(1) == labels[idx]).float().mean()
        return loss.item(), accuracy.item()

    for epoch in range(80):
        model.train()
        optimizer.zero_grad()
        output = model(features, adjacency)
        loss = criterion(output[idx_train], labels[idx_train])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if epoch % 10 == 0:
            val_loss, accuracy = test(idx_val)
            print(f"Epoch {epoch:04d} ({loss.item():.4f}) val loss {val_loss:.4f} accuracy {accuracy:.4f}")
    print("test", test(idx_test))
    report([model], [optimizer], losses)


if __name__ == "__main__":
    main()
