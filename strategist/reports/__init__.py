"""A Plan as a tree and as text. Nothing here prints."""
