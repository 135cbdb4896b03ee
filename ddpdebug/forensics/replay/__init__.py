"""Replays of a forward: on a copy, shrunk to a small batch, from a bundle."""
