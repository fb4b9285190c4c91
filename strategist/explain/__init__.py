"""A Plan as a tree, and the tree as text."""
