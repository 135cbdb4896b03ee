"""Trials on copies: what a check changes is put back."""
