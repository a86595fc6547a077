"""The command line of llmserve, with one module per command."""
