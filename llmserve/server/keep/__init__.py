"""Keeps a Triton and its models alive: detects what has failed, restarts it, and reloads models."""
