"""pearl: asynchronous agentic reinforcement learning on a rollout fleet that changes shape."""

__version__ = "0.1.0"
