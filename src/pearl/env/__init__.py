"""Environments: what users write, the built-in ones, and the codec between their text and tokens."""
