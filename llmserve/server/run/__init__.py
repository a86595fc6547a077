"""A Triton and its frontends as processes: guarded, private, with logs that are read."""
