"""What the stand-ins for Triton's native backends share: requests to batches, and state kept.

They do as the C++ backends do: requests whose tensors have the same shapes run as one batch,
nothing is padded, and a sequence's implicit state goes from each of its requests to the next.
"""
