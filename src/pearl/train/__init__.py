"""Training: warm-up on scripted play, GRPO with the decoupled loss, checkpoints. torch lives here and in `engine`."""
