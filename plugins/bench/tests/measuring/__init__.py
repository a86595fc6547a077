"""Tests of measurements, mostly against a server with scripted response times."""
