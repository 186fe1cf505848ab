"""Between machines: one asynchronous all-reduce of a bucket's flat storage."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_dp.engine.bucket import Bucket
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.wires.wire import InFlight, Wire


class AllReduceWire(Wire):
    """The default: one asynchronous all-reduce of the flat storage.

    Args:
        group: Who takes part. gloo averages in two passes over memory, a sum and a division: there the
            division happens in the copy that fills the bucket, where it is free. It also keeps a sum of
            fp16 gradients from overflowing.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        self.group = group
        self.predivide_factor = 1 / group.world_size if group.waits_on_host else 1.0

    def launch(self, bucket: Bucket) -> InFlight:
        """Start averaging ``bucket`` in place.

        Collective: every rank, in launch order. Does not block.
        """
        flat = bucket.allocate()
        op = dist.ReduceOp.AVG if self.predivide_factor == 1.0 else dist.ReduceOp.SUM
        if op == dist.ReduceOp.AVG and bucket.dtype == torch.float16:
            # A sum of fp16 gradients overflows long before their mean does.
            flat.div_(self.group.world_size)
            op = dist.ReduceOp.SUM
        work: InFlight = dist.all_reduce(flat, op=op, group=self.group.process_group, async_op=True)
        return work
