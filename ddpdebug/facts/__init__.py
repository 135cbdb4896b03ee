"""The facts of a run, derived from its records, and differences between two runs. Torch-free."""
