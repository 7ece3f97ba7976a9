"""Batches: files of requests that are worked on without a client."""
