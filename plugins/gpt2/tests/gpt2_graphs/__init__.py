"""Real graphs of tiny models of several families."""
