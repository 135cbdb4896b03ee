"""Callbacks for trainers of other packages. Each module loads its trainer's package, so none is loaded from here."""
