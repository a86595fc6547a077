"""The command line of llmserve: one module per command."""
