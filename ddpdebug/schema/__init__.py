"""What crosses a border, free of torch: rows, steps, details, announcements, findings."""
