"""What the executor does to a model, one step per module, in the order of `build.STEPS`."""
