"""Downloads models of the Hugging Face hub, or of a mirror of it, into the cache of its client."""
