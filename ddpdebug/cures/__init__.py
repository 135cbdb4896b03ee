"""Source changes that cure findings, as diffs that are shown and never applied."""
