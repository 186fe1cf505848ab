"""The config tree, importable as ``lightning_dp.conf`` so that ``pkg://lightning_dp.conf`` finds it."""
