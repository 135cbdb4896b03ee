"""Probes: they observe the user's objects on the training thread and record facts, never judge and never raise."""
