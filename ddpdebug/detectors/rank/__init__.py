"""Replicas agree."""
