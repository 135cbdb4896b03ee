"""A script that never imports torch.

run: alone
watched: no
"""

import random
import sys

random.seed(1)
print(sys.argv[1:], random.random(), [type(finder).__name__ == "type" for finder in sys.meta_path[:2]])
print("torch" in sys.modules, "numpy" in sys.modules)
