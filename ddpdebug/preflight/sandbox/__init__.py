"""Trials on copies; whatever a check changes is restored."""
