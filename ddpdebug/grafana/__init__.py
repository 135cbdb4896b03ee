"""Grafana: its client and the bundled dashboards."""
