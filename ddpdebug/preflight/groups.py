"""The groups of checks. Torch-free."""

from __future__ import annotations

from ddpdebug.errors import UsageError, did_you_mean

#: The groups in their order, and the module with the function `check` of each.
GROUPS = {
    "data": "data",
    "parameters": "parameters",
    "initial loss": "initial_loss",
    "initialisation": "initialisation",
    "gradient flow": "gradient_flow",
    "overfit": "overfit",
    "learning rate": "lr_finder",
    "determinism": "determinism",
    "throughput": "throughput",
}


def chosen(names: str) -> list[str]:
    """Return the groups in a list with commas; raise UsageError for one that does not exist."""
    wanted = [name.strip().replace("-", " ").replace("_", " ") for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in GROUPS:
            raise UsageError(f"unknown group {name!r}; {did_you_mean(name, GROUPS)}")
    return wanted
