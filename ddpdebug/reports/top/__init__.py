"""A live view of a run for people in a terminal: the verdicts of the dashboards, ranks as rows. Torch-free."""
