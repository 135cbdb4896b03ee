"""A debugger that steps behind the script's last line ends there.

run: alone
watched: no
"""

import io
import pdb
import sys

sys.stdin = io.StringIO("n\nn\nn\nn\nn\nw\nn\n")
pdb.set_trace()
x = 1
print("the last line")
