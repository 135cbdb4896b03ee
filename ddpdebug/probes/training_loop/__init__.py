"""Probes of the training loop as the user has written it: gradients cleared, schedulers, modes, labels, losses."""
