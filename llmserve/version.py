"""The version, in a module of its own: what the package offers needs it while it is imported."""

__version__ = "0.1.0"
