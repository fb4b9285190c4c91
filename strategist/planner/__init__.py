"""From a question to a Plan."""
