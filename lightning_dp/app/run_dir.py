"""One run folder for all ranks, and the same one after a restart.

Hydra puts the time into a run's folder. Lightning's launcher hands the folder to the ranks that it
starts. Under torchrun and srun nobody does: each rank would read its own clock, and a restarted job
would look for its checkpoints in a new folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lightning_dp.launch.environment import started_by_srun

# Names a run whatever started it: the same value on all ranks and in every restart.
RUN_ID_VARIABLE = "LEAN_DDP_RUN_ID"
STORE_KEY = "lightning_dp/run_dir"
STORE_TIMEOUT_S = 120.0
_TIME = re.compile(r"\$\{now:[^}]*\}(?:[-_/ ]*\$\{now:[^}]*\})*")


def run_id(environment: Mapping[str, str]) -> str | None:
    """Return what names this run on all its ranks and in all its restarts, or None.

    Args:
        environment: Variables as in ``os.environ``.

    Returns:
        The first of ``LEAN_DDP_RUN_ID``, torchrun's run id where the user gave one, SLURM's job.
    """
    if given := environment.get(RUN_ID_VARIABLE):
        return given
    # torchrun says "none" where no --rdzv-id was given.
    if (elastic := environment.get("TORCHELASTIC_RUN_ID")) and elastic != "none":
        return elastic
    # In an interactive shell many runs share a job; Lightning starts the ranks there.
    if "SLURM_JOB_ID" in environment and started_by_srun(environment):
        return f"slurm-{environment['SLURM_JOB_ID']}-{environment.get('SLURM_STEP_ID', '0')}"
    return None


def pinned(template: str, name: str) -> str:
    """Put ``name`` where ``template``, a folder before interpolation, has the time.

    Example:
        ``pinned("runs/${now:%Y}/${now:%H}", "a")`` is ``"runs/a"``.
    """
    return _TIME.sub(name, template)


class OneRunDir(Callback):
    """A Hydra callback: agree on ``hydra.run.dir`` before the job starts.

    In a project of your own: ``defaults: [override hydra/callbacks: lean_ddp]``.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Pin the folder where it depends on the time; let rank 0 alone write ``.hydra/``.

        Collective: every rank that torchrun started without a run id; blocks until rank 0 has told
        its folder through torchrun's store.
        """
        template = str(OmegaConf.to_container(config.hydra.run, resolve=False)["dir"])  # type: ignore[index,call-overload]
        rank = external_rank(os.environ)
        with read_write(config), open_dict(config):
            if _TIME.search(template):
                name = run_id(os.environ)
                if name is not None:
                    config.hydra.run.dir = pinned(template, name)
                elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                    config.hydra.run.dir = _agreed(str(config.hydra.run.dir), rank)
            if rank > 0:
                config.hydra.output_subdir = None
                config.hydra.job.name = f"{config.hydra.job.name}_rank{rank}"


def external_rank(environment: Mapping[str, str]) -> int:
    """This process's rank where torchrun or srun started it, else 0."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return int(environment["RANK"])
    return int(environment["SLURM_PROCID"]) if started_by_srun(environment) else 0


def _agreed(folder: str, rank: int) -> str:
    """Take rank 0's folder on every rank, over the store that torchrun's agent keeps."""
    from lightning_dp.faults.store import tcp_store

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = tcp_store(host, port, hosts=False, timeout_s=STORE_TIMEOUT_S)
    if rank == 0:
        # compare_set keeps the folder of an earlier attempt where the store has outlived it.
        return store.compare_set(STORE_KEY, "", folder).decode()
    return store.get(STORE_KEY).decode()
