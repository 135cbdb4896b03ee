"""The facts of a run, folded out of what it has recorded, and in what two runs differ. Torch-free."""
