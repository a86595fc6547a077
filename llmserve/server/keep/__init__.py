"""Keeps Tritons, their models and frontends answering: it looks, decides, acts, and looks again."""
