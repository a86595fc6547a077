"""From a request to its text: what is read, chosen, constrained, decoded, formatted and sent."""
