"""The simulated world: the ports of the runtime on virtual time."""
