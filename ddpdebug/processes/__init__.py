"""Processes that a command starts or becomes: the script, torchrun, its supervisor; and stacks of a hang."""
