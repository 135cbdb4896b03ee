"""Output of the preflight: terminal lines, an HTML page, plots, files."""
