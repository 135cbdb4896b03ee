"""The version of ddpdebug, which the package's metadata are made from."""

__version__ = "0.1.0"
