"""Errors that torch raises, explained."""
