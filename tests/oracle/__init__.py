"""A second derivation of memory, time and the search space: one layout at a time, from the documents."""
