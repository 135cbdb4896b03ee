"""Callbacks for the trainers of others. Each module loads its trainer's package, so none is loaded from here."""
