"""The hub: a web service that shows a team's runs from mirrored run directories. Imported by `ddpdebug hub` only."""
