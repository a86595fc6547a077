"""Whether the weights of a checkpoint are those of the model that its configuration describes."""
