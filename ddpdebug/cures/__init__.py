"""Changes of the user's source that end what a finding says, as diffs that are shown and never made."""
