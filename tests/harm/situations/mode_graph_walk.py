"""The script walks the graph of its loss."""

import torch
from _report import batches, report, start
from torch import nn

start()
model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
calls = {"node": 0, "pre": 0, "leaf": 0, "tensor": 0, "several": 0}


def count(name):
    calls[name] += 1


def walk(node):
    names, todo, known = [], [node], set()
    while todo:
        node = todo.pop()
        if node is None or node in known:
            continue
        known.add(node)
        names.append(f"{node.name()} {sorted(vars(node)) if hasattr(node, '__dict__') else ''} {len(node.metadata)}")
        todo += [previous for previous, _ in node.next_functions]
    return sorted(names)


losses, walks = [], set()
for x in batches(40):
    optimizer.zero_grad()
    x.requires_grad_()
    out = model(x)
    loss = out.square().mean()
    walks.add(tuple(walk(loss.grad_fn)))
    loss.grad_fn.register_hook(lambda *args: count("node"))
    loss.grad_fn.register_prehook(lambda *args: count("pre"))
    out.register_hook(lambda gradient: count("tensor"))
    several = torch.autograd.graph.register_multi_grad_hook([*model.parameters()], lambda found: count("several"))
    leaf = torch.autograd.graph.get_gradient_edge(model[0].weight).node.register_hook(lambda *args: count("leaf"))
    with torch.autograd.graph.save_on_cpu():
        more = model(x).mean()
    (loss + more).backward()
    optimizer.step()
    losses.append(loss.detach())
    several.remove()
    leaf.remove()
    hooks = [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in model.parameters()]
    walks.add(tuple(str(one) for one in hooks))
report([model], [optimizer], losses, calls=calls, walks=sorted(walks))
