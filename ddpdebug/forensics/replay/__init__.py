"""Replays of a forward and backward: in a copy of the process, or from a bundle."""
