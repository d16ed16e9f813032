"""The core of real-time generative video: models, sampling, engine, command line.

Imports nothing of the other packages (`rtgen.cli` alone looks up the stack, lazily).
Importing `rtgen` or `rtgen.config` imports no torch.
"""

__version__ = "0.1.0"
