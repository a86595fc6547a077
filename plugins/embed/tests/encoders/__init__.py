"""Tests of models that answer with values, and the tiny models for them."""
