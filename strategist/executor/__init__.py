"""A Plan as live torch objects. Only this folder and `measure` may import torch."""
