"""The waiting lines: one Redis Stream per model and class, one consumer group for all ingresses."""
