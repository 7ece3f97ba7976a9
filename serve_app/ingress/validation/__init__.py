"""What is validated before any work on a request: JSON structure, fields and limits."""
