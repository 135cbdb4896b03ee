"""Expensive examinations, made on demand."""
