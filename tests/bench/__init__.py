"""Benchmarks: they print ratios of one run and pass no judgement. ``make bench`` runs them."""
