"""Where a Triton comes from (embedded, a binary, Docker), and how each is started."""
