"""What somebody else's server was started with, read and written as ``llmserve.toml``."""
