"""From a spec to a model in a repository: plan, stage, publish."""
