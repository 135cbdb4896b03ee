"""Isolation of the job from ddpdebug: probes run under a guard, and exceptions of user code stay the user's."""
