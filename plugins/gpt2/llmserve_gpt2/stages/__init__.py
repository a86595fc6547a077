"""The first and the last stage of the ensemble."""
