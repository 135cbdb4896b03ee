"""The operation and the line of a loss that went wrong."""
