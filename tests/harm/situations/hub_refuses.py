"""A hub that refuses what is pushed is reported once.

env: DDPDEBUG_HUB=http://127.0.0.1:18766
"""

import sys

from _hub import answers, train

answers(18766, b"HTTP/1.1 401 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
train()
sys.exit(7)
