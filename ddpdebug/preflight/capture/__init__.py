"""Capture of a running script's model, batches and optimizer for the preflight."""
