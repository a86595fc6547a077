"""Which requests run together: whole batches, or steps that requests join while others run."""
