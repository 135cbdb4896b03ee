"""Output of the preflight: lines for the terminal, a page, plots, files."""
