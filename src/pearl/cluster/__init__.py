"""Real ports on Ray: actors for rollout workers, trainer and environments, weights through shared memory."""
