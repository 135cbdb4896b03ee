"""The script runs another one by runpy, with an import hook of its own that rewrites modules."""

import ast
import importlib.abc
import importlib.machinery
import inspect
import runpy
import sys
from pathlib import Path

import torch
from _report import report, start
from torch import nn

Path("layers.py").write_text(
    "from torch import nn\n"
    "class Net(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.a = nn.Linear(16, 4)\n"
    "    def forward(self, x):\n"
    "        return self.a(x)\n"
)
Path("inner.py").write_text(
    "import sys, layers, torch\n"
    "from _report import train\n"
    "model = layers.Net()\n"
    "optimizer = torch.optim.SGD(model.parameters(), 0.01)\n"
    "if __name__ == '__main__':\n"
    "    losses = train(model, optimizer)\n"
    "    print(sys.argv, __file__, sys._getframe(0).f_code.co_name, layers.NOTE)\n"
)


class Notes(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path, *, _optimization=-1):
        tree = ast.parse(bytes(data) + b"NOTE = 'rewritten'\n")
        return compile(tree, path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    asked = []

    def find_spec(self, name, path=None, target=None):
        if name == "layers":
            self.asked.append(name)
            return importlib.machinery.ModuleSpec(name, Notes(name, "layers.py"), origin="layers.py")


start()
sys.meta_path.insert(0, Finder())
sys.path.insert(0, ".")
sys.argv = ["inner.py", "--lr", "1"]
done = runpy.run_path("inner.py", run_name="__main__")
model = done["model"]
print(Finder.asked, [type(finder).__name__ for finder in sys.meta_path][:1], len(inspect.stack()))
report([model], [done["optimizer"]], done["losses"], name=type(model).__module__)
sys.meta_path.pop(0)
