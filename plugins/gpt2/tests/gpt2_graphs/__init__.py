"""Tests with real graphs of tiny models of several families."""
