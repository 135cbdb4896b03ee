"""Probes of the user's training loop: gradients cleared, schedulers, modes, labels, losses."""
