"""The monitor of an attached process: attaching, sampling, answering, closing."""
