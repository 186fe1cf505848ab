"""The ground ``gpu`` rehearsed on a CPU: ``pytest -p tests.support.rehearsal -m gpu tests/multi_process``.

Ranks appear as hosts of one device each and reads come one step late, as on a GPU that ranks share over
gloo. What is left for a GPU to show is CUDA itself. Nothing of this is part of the usual tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lightning_dp.engine.group import ReplicaGroup
from tests.support import grounds


@dataclasses.dataclass(frozen=True)
class Rehearsal(grounds.Ground):
    """Everything of the GPU's ground but the GPU."""

    device_type = "cpu"

    def needs(self, world_size: int) -> int:
        return 0

    def device(self, rank: int) -> torch.device:
        return torch.device("cpu")

    def enter(self, rank: int) -> None:
        pass

    def trainer_options(self, world_size: int) -> dict[str, Any]:
        return {"accelerator": "cpu", "devices": 1, "num_nodes": world_size}


def _install() -> None:
    """At import, which comes before fixtures look at ``grounds``."""
    create, why_not = ReplicaGroup.create, grounds.why_not

    def created(device: torch.device, *args: Any, **options: Any) -> ReplicaGroup:
        late = False if isinstance(grounds.CURRENT, Rehearsal) else None
        given = options.pop("host_reads_are_free", None)
        free = late if given is None else given
        return create(device, *args, host_reads_are_free=free, **options)

    ReplicaGroup.create = created
    grounds.GPU = Rehearsal(**vars(grounds.GPU))
    grounds.why_not = lambda gpus: "" if gpus == 1 else why_not(gpus)


_install()
