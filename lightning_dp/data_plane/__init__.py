"""Data in a Trainer's life: who gets which sample, exact evaluation, resume on any number of ranks."""

from lightning_dp.data_plane.options import DataOptions
from lightning_dp.data_plane.plane import DataPlane

__all__ = ["DataOptions", "DataPlane"]
