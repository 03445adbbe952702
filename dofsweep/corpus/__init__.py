"""Text: where it comes from, how it is divided, and how it becomes packed token sequences."""
