"""Runs a script through `ddpdebug.processes.script` with nothing attached: what is left is the runner itself."""
import sys

from ddpdebug.processes.outermost import call_outermost
from ddpdebug.processes.script import Target, run_script

words = sys.argv[1:]
module = words[0] == "-m"
name, *args = words[module:]
call_outermost(run_script, Target(name=name, args=tuple(args), module=module), lambda: None)
