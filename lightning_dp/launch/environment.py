"""Is this process what the environment says it is? Checked before anything waits.

Each problem is told with what was seen and the line that fixes it. The checks are pure: they read a
mapping and numbers, so that ``lean-ddp doctor`` can use them too.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lightning_dp.errors import LaunchError

if TYPE_CHECKING:
    from lightning_dp.internals.lightning import ClusterEnvironment

PARENT_VARIABLE = "LEAN_DDP_PARENT"  # process number of the launcher that started this rank
PID_VARIABLE = "LEAN_DDP_PID"  # process number of the rank that these variables were made for
_KINDS = {
    "LightningEnvironment": "lightning",
    "TorchElasticEnvironment": "torchrun",
    "SLURMEnvironment": "slurm",
}
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
INHERITED = (*RANK_VARIABLES, PARENT_VARIABLE, PID_VARIABLE)  # by what a rank starts


def remember_variables(*names: str) -> Callable[[], None]:
    """Remember ``INHERITED`` and ``names`` of this process's environment; return what puts them back."""
    before = {name: os.environ.get(name) for name in (*INHERITED, *names)}

    def put_back() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return put_back


def started_by_srun(environment: Mapping[str, str]) -> bool:
    """Whether SLURM started this process as a rank, as Lightning sees it.

    In an interactive shell many runs share a job, and Lightning starts the ranks.
    """
    interactive = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_NTASKS" in environment and not interactive


@dataclasses.dataclass(frozen=True)
class Placement:
    """What a cluster environment and a Trainer say.

    Attributes:
        kind: "lightning", "torchrun", "slurm", or the name of another environment's class.
        external: Whether somebody else starts the ranks.
        local_rank: This process's number on its machine.
        world_size: How many ranks the environment speaks of.
        devices: How many ranks the Trainer wants on a machine.
        num_nodes: On how many machines.
        pid: This process.
    """

    kind: str
    external: bool
    local_rank: int
    world_size: int
    devices: int
    num_nodes: int
    pid: int

    @classmethod
    def of(cls, environment: ClusterEnvironment, devices: int, num_nodes: int) -> Placement:
        """What ``environment`` says of this process, for a Trainer of ``devices`` x ``num_nodes``."""
        kind = _KINDS.get(type(environment).__name__, type(environment).__name__)
        external = environment.creates_processes_externally
        # Lightning's own environment is told the world size by the Trainer: it cannot disagree.
        world_size = devices * num_nodes if kind == "lightning" else environment.world_size()
        local_rank = environment.local_rank() if external else 0
        return cls(kind, external, local_rank, world_size, devices, num_nodes, os.getpid())

    @property
    def is_believed(self) -> bool:
        """Whether the environment says how many ranks there are, whatever the Trainer says.

        For torchrun and SLURM the Trainer's number is a check. Any other environment has been told that
        number by Lightning: where it still says another one, it knows better.
        """
        return self.external and self.kind not in _KINDS.values()

    @property
    def wanted(self) -> int:
        """How many ranks there are to be."""
        return self.world_size if self.is_believed else self.devices * self.num_nodes


def check_placement(place: Placement, environment: Mapping[str, str]) -> list[str]:
    """Compare what the Trainer wants with what was started.

    Args:
        place: As seen by the launcher.
        environment: Variables as in ``os.environ``.

    Returns:
        Warnings.

    Raises:
        LaunchError: The ranks cannot find each other, or would be other ranks than the Trainer thinks.
    """
    _check_inherited(place, environment)
    if place.external and place.world_size != place.wanted:
        raise LaunchError(_world_size_message(place))
    if place.external and place.local_rank >= place.devices:
        raise LaunchError(
            f"[lean_ddp] this process has local rank {place.local_rank}, but devices={place.devices} "
            f"has ranks 0 to {place.devices - 1}. Fix: devices={place.local_rank + 1} or more, or "
            "start fewer processes on each machine."
        )
    if place.kind == "lightning" and place.external and place.wanted > 1:
        return _check_by_hand(place, environment)
    return []


def _check_inherited(place: Placement, environment: Mapping[str, str]) -> None:
    """A program started by a rank inherits its variables, but is no rank."""
    owner = environment.get(PID_VARIABLE)
    alone = place.wanted == 1 and place.local_rank == 0  # meets nobody, whatever it has inherited
    if place.kind == "lightning" and owner and int(owner) != place.pid and not alone:
        names = " ".join(f"-u {name}" for name in INHERITED)
        raise LaunchError(
            f"[lean_ddp] this process ({place.pid}) has inherited the environment of rank "
            f"{environment.get('LOCAL_RANK', '?')} of another run (process {owner}): it was started "
            f"from inside a training script. Fix: start it with 'env {names} python ...', or use "
            "devices=1 there."
        )


def _world_size_message(place: Placement) -> str:
    wanted = f"devices={place.devices} x num_nodes={place.num_nodes} is {place.wanted}"
    seen = place.world_size
    if place.kind == "slurm":
        tasks = f"SLURM reports {seen} task{'s' if seen != 1 else ''}"
        return (
            f"[lean_ddp] {tasks}, but {wanted} ranks: each would train on its part of the data and "
            "the parts of the missing ranks would never be seen. Fix: srun "
            f"--nodes={place.num_nodes} --ntasks-per-node={place.devices} python ...; in an interactive "
            "shell, rename the job (SLURM_JOB_NAME=interactive) to let lean_ddp start the ranks; or "
            f"set devices={max(1, seen // max(1, place.num_nodes))}."
        )
    return (
        f"[lean_ddp] {place.kind} speaks of {seen} ranks, but {wanted}. Fix: torchrun "
        f"--nnodes={place.num_nodes} --nproc-per-node={place.devices} ..., or set "
        f"devices={max(1, seen // max(1, place.num_nodes))}."
    )


def _check_by_hand(place: Placement, environment: Mapping[str, str]) -> list[str]:
    """``LOCAL_RANK`` without torchrun, SLURM or our launcher: by hand, or left over."""
    if PID_VARIABLE in environment:
        return []
    others = [rank for rank in range(place.devices) if rank != place.local_rank]
    message = (
        f"LOCAL_RANK={environment.get('LOCAL_RANK', '')} is set, so this process takes itself for a "
        f"rank that somebody else started, one of {place.wanted}"
    )
    if "MASTER_PORT" not in environment:
        raise LaunchError(
            f"[lean_ddp] {message}. Without MASTER_PORT nobody can have started the others: local rank(s) "
            f"{', '.join(map(str, others))} are missing. Fix: unset LOCAL_RANK (it was left over), "
            "or start the ranks with torchrun."
        )
    given = environment.get("WORLD_SIZE")
    if given is not None and int(given) != place.wanted:
        raise LaunchError(
            f"[lean_ddp] WORLD_SIZE={given} is set, but devices={place.devices} x "
            f"num_nodes={place.num_nodes} is {place.wanted}. Fix: make them agree, or unset the "
            f"variables that were left over: {', '.join(RANK_VARIABLES)}."
        )
    if "RANK" not in environment and given is None:
        return [
            f"lean_ddp: {message}. If that is not so, stop now and unset LOCAL_RANK; otherwise the other "
            f"ranks must come within the rendezvous timeout."
        ]
    return []


def check_group(place: Placement, group_size: int) -> None:
    """Compare a process group that exists already with what is expected.

    Raises:
        LaunchError: It has another size.
    """
    if group_size == place.wanted:
        return
    said, or_else = f"{place.kind} speaks of {place.wanted}", ""
    if not place.is_believed:
        said = f"devices={place.devices} x num_nodes={place.num_nodes} is {place.wanted}"
        or_else = f", or give it devices={max(1, group_size // max(1, place.num_nodes))}"
    raise LaunchError(
        f"[lean_ddp] a process group of {group_size} ranks exists already, but {said}. Fix: call "
        f"torch.distributed.destroy_process_group() on all ranks before this Trainer{or_else}."
    )


def compare_members(members: tuple[dict[str, object], ...], rank: int) -> None:
    """All ranks must run the same job.

    Args:
        members: What each rank brought to the rendezvous; ``job`` is compared.
        rank: This rank.

    Raises:
        LaunchError: They run different ones; both are shown.
    """
    first = members[0].get("job")
    for other, member in enumerate(members):
        if member.get("job") != first:
            raise LaunchError(
                f"[lean_ddp rank {rank}/{len(members)}] the ranks run different jobs.\n"
                f"  rank 0: {first}\n  rank {other}: {member.get('job')}\n"
                "Each rank ran its own sweep, or was given other overrides. Fix: let lean_ddp start "
                "the ranks of a sweep (python app.py -m ..., without torchrun or srun)."
            )
