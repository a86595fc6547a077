"""Builds models into repositories: plan, stage, publish."""
