"""Facts that several parts share, as plain data; nothing else of llmserve is imported here."""
