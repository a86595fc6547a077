"""Tests of checks, mostly against a server of hashes that has one fault."""
