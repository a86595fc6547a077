"""What is emitted for each version, without a server."""
