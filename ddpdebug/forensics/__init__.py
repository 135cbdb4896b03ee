"""Expensive looks, taken on demand."""
