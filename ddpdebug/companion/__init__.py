"""The process beside the rank that leads a run, in which the rules judge what the ranks have sent. Torch-free."""
