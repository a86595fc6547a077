"""Releases: a new build of a model beside the old one, and which of them answers whom."""
