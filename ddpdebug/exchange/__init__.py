"""The exchange between the ranks: rows and messages travel in ticks, over a process group that torch does not know."""
