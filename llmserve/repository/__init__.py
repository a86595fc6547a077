"""A model repository on disk: configuration, manifest, sources, Dockerfiles, publishing, checks."""
