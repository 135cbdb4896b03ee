"""Runs `stops.py` with ranks that take each other for ranks of other hosts.

    python on_hosts.py 0,0,1 KIND RANK STEP SECONDS

The n-th number is the host of rank n: black boxes and processes of another number are not seen.
"""

import os
import runpy
import sys
from pathlib import Path

from ddpdebug.progress import kernel

own = sys.argv.pop(1).split(",")[int(os.environ["RANK"])]
kernel.host = lambda: f"host {own}"
runpy.run_path(str(Path(__file__).with_name("stops.py")), run_name="__main__")
