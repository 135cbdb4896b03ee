"""Grafana: its client, annotations and the bundled dashboards."""
