"""A Plan as files for launchers and frameworks."""
