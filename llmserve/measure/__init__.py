"""Measure a served model: load, statistics, comparison and sweep.

``llmserve bench``, ``compare`` and ``sweep`` are thin commands over this package. What they
give is in :mod:`llmserve.measure.results`; what the figures mean, in
:mod:`llmserve.measure.summary`.
"""

from __future__ import annotations
