"""The checks that people keep in their heads, run before training on copies of what the script trains."""
