"""Programs for who works on llmserve. They measure and make; none is a plugin, or a test.

``bench``
    the figures of ``docs/benchmarks.md``: ``make bench``, ``make bench-engines``
``gpu``
    what is true on a machine with a GPU: ``make gpu-bundle``, ``make gpu``
``demo_trainer``
    makes the demo model
"""
