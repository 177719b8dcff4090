"""Which training samples shaped what a model says."""
