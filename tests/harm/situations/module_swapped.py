"""Parameters, inputs and outputs swapped by conversions, load_state_dict and swap_tensors."""

import torch
from _report import batches, report, start, train
from torch import nn

start()
torch.__future__.set_swap_module_params_on_conversion(True)
model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
losses = train(model, optimizer)
for number, x in enumerate(batches(30)):
    if number == 20:
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    out = model(x)
    loss = out.square().mean()
    loss.backward()
    for p in model.parameters():
        p.grad.nan_to_num_(0)
    optimizer.step()
    losses.append(loss.detach())
    torch.utils.swap_tensors(x, torch.zeros(3))
    detached = out.detach()
    torch.utils.swap_tensors(detached, torch.ones(2))
    del out, loss
    if number % 10 == 3:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    if number % 10 == 5:
        optimizer.zero_grad()
        torch.utils.swap_tensors(model[0].bias, nn.Parameter(torch.full((8,), 0.25)))
model.double()
again = torch.optim.SGD(model.parameters(), 0.01)
losses += train(model, again, (x.double() for x in batches()))
model.to(torch.float32)
del optimizer, again
model.half().float()
report([model], [], losses, dtype={p.dtype for p in model.parameters()})
