"""What the preflight shows: text, page, plots, files."""
