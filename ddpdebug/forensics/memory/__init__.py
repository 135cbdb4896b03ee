"""What holds memory: out-of-memory reports, growth and who keeps it."""
