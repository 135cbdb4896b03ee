"""The data that crosses process or file borders, free of torch: rows, steps, details, announcements, findings."""
