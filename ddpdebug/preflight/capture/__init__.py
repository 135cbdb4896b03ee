"""What the preflight takes from a script that runs: model, batches, optimizer."""
