"""What clients upload and what batches write: objects in a storage, and records in Redis."""
