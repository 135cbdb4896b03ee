"""Training as a test case: no logs, no warnings, `mock`."""

import io
import logging
import sys
import unittest
import warnings
from unittest import mock

import torch
from _report import batches, report, start, train
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x):
        return self.layer(x)


class Tests(unittest.TestCase):
    def setUp(self):
        start()
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def trained(self, count=12):
        return train(self.model, self.optimizer, batches(count))

    def test_logs(self):
        logging.lastResort = None
        with self.assertLogs(level=logging.DEBUG) as caught:
            logging.getLogger("mine").debug("one")
            self.losses = self.trained()
        self.assertEqual(len(caught.records), 1)
        report([self.model], [self.optimizer], self.losses)

    def test_warnings(self):
        with self.assertWarns(UserWarning) as caught:
            losses = self.trained()
            warnings.warn("mine", UserWarning, stacklevel=1)
        self.assertEqual(caught.filename, __file__)
        report([self.model], [self.optimizer], losses)

    def test_step(self):
        with mock.patch.object(torch.optim.SGD, "step", autospec=True) as step:
            self.trained()
        print(len(step.mock_calls), [len(call.args) for call in step.call_args_list][:2])
        with mock.patch.object(self.optimizer, "step", wraps=self.optimizer.step) as step:
            losses = self.trained()
        print(len(step.mock_calls))
        report([self.model], [self.optimizer], losses)

    def test_forward(self):
        with mock.patch.object(Net, "forward", autospec=True, side_effect=Net.forward) as forward:
            losses = self.trained()
        print(len(forward.mock_calls), sorted({str(call)[:80] for call in forward.mock_calls if "tensor" not in str(call)}))
        with mock.patch.object(self.model, "forward", wraps=self.model.forward) as forward:
            losses += self.trained()
        print(len(forward.mock_calls), sorted({str(call)[:80] for call in forward.mock_calls if "tensor" not in str(call)}))
        with mock.patch("torch.Tensor.backward", autospec=True) as backward:
            losses += self.trained()
        print(len(backward.mock_calls))
        model = mock.create_autospec(self.model)
        model.return_value = torch.zeros(2, 4, requires_grad=True)
        losses += train(model, self.optimizer)
        print(len(model.mock_calls))
        report([self.model], [self.optimizer], losses)


stream = io.StringIO()
result = unittest.TextTestRunner(stream, verbosity=2).run(unittest.defaultTestLoader.loadTestsFromTestCase(Tests))
print("".join(line for line in stream.getvalue().splitlines(True) if not line.startswith("Ran ")))
sys.exit(not result.wasSuccessful())
