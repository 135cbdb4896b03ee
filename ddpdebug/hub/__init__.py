"""The hub: one place that shows the runs of a team, from mirrored run directories. Imported by `ddpdebug hub` only."""
