"""The threshold of local SGD, which `diagnosis/local_steps.py` reads on ranks too: these load no rules."""

from __future__ import annotations

from ddpdebug.detectors.thresholds import Threshold

LOCAL_STEPS = Threshold(
    32,
    "steps within which replicas that train apart must agree again to be local SGD",
    source="periods of 4 and 8 are the defaults of torch and accelerate; a mistake is told so many steps late",
    name="local_steps",
)
