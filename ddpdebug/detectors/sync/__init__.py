"""Gradients are synchronised."""
