"""The picture of one step: computing, buckets on the wire, and the wait that was not hidden.

bash benchmarks/hosts.sh 1gbit 2 python -m benchmarks.timeline timeline.png
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch

from benchmarks.models import job
from benchmarks.step_time import bare_trainer, quiet
from lightning_dp import StepTimeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("--model", default="transformer")
    parser.add_argument("--strategy", default="lean", help="as the contenders of step_time")
    parser.add_argument("--link", default="loopback", help="only a label; hosts.sh sets the rate")
    args = parser.parse_args()
    torch.set_num_threads(1)
    module = job(args.model)
    with tempfile.TemporaryDirectory() as folder, quiet():
        trainer = bare_trainer(
            args.strategy, int(os.environ["WORLD_SIZE"]), StepTimeline(step=10, dirpath=folder)
        )
        trainer.fit(module, module.loader(16))
        if trainer.is_global_zero:
            shutil.copy(Path(folder) / "timeline.png", args.picture)
            print(f"{args.model}, {trainer.world_size} ranks, link {args.link}: {args.picture}")


if __name__ == "__main__":
    main()
