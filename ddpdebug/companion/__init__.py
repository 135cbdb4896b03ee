"""The companion: a process beside the leading rank, in which the rules judge the steps of all ranks. Torch-free."""
