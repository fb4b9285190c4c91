"""The Plan and what surrounds it: the waist of the house."""
