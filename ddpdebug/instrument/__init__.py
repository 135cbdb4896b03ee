"""Installation of ddpdebug in torch while it is attached: wrappers and probes."""
