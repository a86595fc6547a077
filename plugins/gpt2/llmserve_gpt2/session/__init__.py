"""The stage that owns the sessions: who is under way, what was said, and what is asked next."""
