"""Files of requests, and batches that answer them when nobody else asks."""
