"""The Prometheus endpoint: `exporter` is the sink, `metrics` has every name, `server` is HTTP, `discovery` the targets."""
