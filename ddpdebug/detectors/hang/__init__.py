"""Progress. Its codes are planned."""
