"""Scripts that make what is not in the repository, and check what is."""
