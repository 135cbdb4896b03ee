r"""Sine waves predicted by two recurrent cells in float64, with LBFGS and a closure.

manner = "pytorch/examples, time_sequence_prediction"

[[fault]]
name = "the closure does not clear the gradients"
old = "            optimizer.zero_grad()\n"
new = ""
codes = ["RCP808"]
"""
import torch
from _report import report
from torch import nn, optim


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 24)
        self.lstm2 = nn.LSTMCell(24, 24)
        self.linear = nn.Linear(24, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t = torch.zeros(input.size(0), 24, dtype=torch.double)
        c_t = torch.zeros(input.size(0), 24, dtype=torch.double)
        h_t2 = torch.zeros(input.size(0), 24, dtype=torch.double)
        c_t2 = torch.zeros(input.size(0), 24, dtype=torch.double)
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


def main():
    torch.manual_seed(0)
    start = torch.randint(-80, 80, (24, 1), generator=torch.Generator().manual_seed(2))
    data = torch.sin((torch.arange(60) + start) / 6.0).double()
    input, target = data[3:, :-1], data[3:, 1:]
    test_input, test_target = data[:3, :-1], data[:3, 1:]
    seq = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(seq.parameters(), lr=0.5, max_iter=6)
    losses = []
    for i in range(8):
        print("STEP:", i)

        def closure():
            optimizer.zero_grad()
            out = seq(input)
            loss = criterion(out, target)
            loss.backward()
            losses.append(loss.detach())
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            pred = seq(test_input, future=10)
            print("test loss:", criterion(pred[:, :-10], test_target).item())
    report([seq], [optimizer], losses)


if __name__ == "__main__":
    main()
