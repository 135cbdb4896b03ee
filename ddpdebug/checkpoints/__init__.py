"""States of models compared: checkpoints on a disk, and live ones, whatever their sharding."""
