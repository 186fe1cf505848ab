"""The Hydra application: ``lean-ddp train`` and what belongs to it. Only this folder imports hydra."""
