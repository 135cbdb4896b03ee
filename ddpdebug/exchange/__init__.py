"""The exchange between the ranks: rows and messages cross in ticks, over a process group that torch does not know."""
