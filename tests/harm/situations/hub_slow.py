"""A hub that accepts connections and never answers: the end does not wait.

env: DDPDEBUG_HUB=http://127.0.0.1:18765
"""

import sys

from _hub import answers, train

answers(18765, b"")
train()
sys.exit(7)
