"""The session stage: tracks active sequences, their texts, and the next tokens to generate."""
