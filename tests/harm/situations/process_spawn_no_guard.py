"""torch.multiprocessing.spawn without a main guard, which Python refuses.

run: alone
watched: no, nothing trains
"""

import torch.multiprocessing as mp
from _report import start


def rank_main(rank):
    print("never", rank)


start()
mp.spawn(rank_main, (), 1)
