"""The model against the world: measured runs from a table, predicted, compared and summed up."""
