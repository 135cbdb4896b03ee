"""A hub that takes connections and never answers: nobody waits for it, at the end neither.

env: DDPDEBUG_HUB=http://127.0.0.1:18765
"""

import sys

from _hub import answers, train

answers(18765, b"")
train()
sys.exit(7)
