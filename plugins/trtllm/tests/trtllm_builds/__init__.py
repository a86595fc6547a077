"""Tests of the files that builds emit for each version, without a server."""
