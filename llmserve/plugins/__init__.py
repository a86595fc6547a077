"""What a plugin is: roles and their components, hooks, options, the registry, the API number."""
