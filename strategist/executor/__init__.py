"""A Plan as live torch objects. Only this folder and `measure` may import torch.

`support` answers without torch whether a plan can run here. `build.build` makes a Session from a plan and a model,
`train.train` is the default job, and `python -m strategist.executor PLAN` runs it under torchrun.
"""
