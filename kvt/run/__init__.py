"""One run: from a configuration to its result, its folder and its checkpoints."""
