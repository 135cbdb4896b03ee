"""Speed. Its codes are planned."""
