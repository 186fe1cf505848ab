"""Data-parallel training for PyTorch Lightning: ``Trainer(strategy="lean_ddp")``."""

__version__ = "0.1.0"
