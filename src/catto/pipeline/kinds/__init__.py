"""The kinds of stages, one module each."""
