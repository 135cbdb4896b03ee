"""Comparison of model states: checkpoints on a disk and live models, whatever their sharding."""
