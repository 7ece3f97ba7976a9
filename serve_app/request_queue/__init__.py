"""The queues: one Redis Stream per model and class, with one consumer group for all ingresses."""
