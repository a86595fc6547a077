"""Model repositories: configuration, manifest, sources, Dockerfiles, publishing, checks."""
