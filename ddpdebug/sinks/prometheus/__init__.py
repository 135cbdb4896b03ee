"""The Prometheus endpoint: `exporter` is the sink, `metrics` the names, `server` HTTP, `discovery` the targets."""
