"""The settings: read from the command line, the environment and pyproject.toml, and checked before anything starts."""
