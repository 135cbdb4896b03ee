"""What holds for all tests."""

from __future__ import annotations

import os

# a wish of whoever runs the tests; to the commands under test it would be an option that does not exist
REQUIRE_SLURM = "REQUIRE_SLURM"
if "DDPDEBUG_REQUIRE_SLURM" in os.environ:
    os.environ[REQUIRE_SLURM] = os.environ.pop("DDPDEBUG_REQUIRE_SLURM")
