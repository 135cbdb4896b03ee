"""The Prometheus endpoint: `exporter` is the sink, `metrics` all names, `server` the HTTP, `discovery` the targets."""
