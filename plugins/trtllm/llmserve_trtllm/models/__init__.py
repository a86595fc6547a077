"""The configurations of the ensemble's models, each filled field by field for one version."""
