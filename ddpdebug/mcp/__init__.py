"""Answers to programs that ask about runs over the Model Context Protocol."""
