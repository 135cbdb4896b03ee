"""The operation, and the source line, that made a loss non-finite."""
