"""The processes that a command starts or runs in: the script, torchrun, its supervisor, stacks of a hang."""
