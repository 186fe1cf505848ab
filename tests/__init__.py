"""Tests. Imports and fits make many objects that live on; to look at them again and again takes a tenth."""

import gc

gc.set_threshold(100_000)
