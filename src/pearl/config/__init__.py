"""Configuration: pydantic trees, TOML recipes, overrides. Imports no heavy library."""
