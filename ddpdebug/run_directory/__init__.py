"""The run directory: its writer, its reader and the segments of rows."""
