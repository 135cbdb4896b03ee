# title: Another object than the one that validates is put into eval mode
# source: constructed
# nproc: 1
# expect.codes: RCP805
# expect.ranks: all
# expect.subject: any
# expect.step: any
# plain_pytorch: silent
"""A trainer with a copy of the best model, which is evaluated at the end."""
import copy
import os

import torch
import torch.nn as nn


class Study:
    fault = os.environ.get("FAULT") == "1"

    def __init__(self):
        torch.manual_seed(4)
        self.model = nn.Sequential(nn.Linear(9, 64), nn.ReLU(), nn.Dropout(0.4), nn.Linear(64, 1))
        self.best_model, self.best = copy.deepcopy(self.model), float("inf")
        self.optimizer = torch.optim.NAdam(self.model.parameters(), lr=2e-3)
        self.loss = nn.MSELoss()
        self.exam = self.sample(128)

    def sample(self, n):
        x = torch.rand(n, 9) * 2 - 1
        return x, torch.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]

    @torch.inference_mode()
    def examine(self):
        (self.best_model if self.fault else self.model).eval()
        x, y = self.exam
        score = self.loss(self.model(x), y).item()
        self.model.train()
        if score < self.best:
            self.best = score
            self.best_model.load_state_dict(self.model.state_dict())

    def run(self, epochs=6, steps=20):
        for _ in range(epochs):
            for _ in range(steps):
                x, y = self.sample(32)
                self.optimizer.zero_grad()
                self.loss(self.model(x), y).backward()
                self.optimizer.step()
            self.examine()
        print(f"best {self.best:.4f}")


Study().run()
