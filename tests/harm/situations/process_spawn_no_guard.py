"""torch.multiprocessing.spawn in a script without a main guard, which Python refuses in the new process.

run: alone
watched: no, nothing trains
"""

import torch.multiprocessing as mp
from _report import start


def rank_main(rank):
    print("never", rank)


start()
mp.spawn(rank_main, (), 1)
