"""What is validated before any work on a request: headers, JSON structure, fields and limits."""
