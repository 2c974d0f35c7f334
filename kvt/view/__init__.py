"""Pictures of attention maps, and an HTML page to explore attention maps."""
