"""The training loop: what it calls, in which order, with what."""
