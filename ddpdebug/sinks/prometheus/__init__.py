"""The Prometheus endpoint: `exporter` is the sink, `metrics` has all names, `server` is HTTP, `discovery` the targets."""
