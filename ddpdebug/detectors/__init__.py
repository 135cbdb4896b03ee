"""The rules: one file per finding code, grouped in folders by family. Torch-free, pure, no I/O."""
