#!/usr/bin/env bash
# torchrun starts the ranks: bash examples/from_torchrun.sh trainer.max_epochs=3
#
# On several machines run the same line on each, with --nnodes=N --rdzv-id=NAME
# --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT, and trainer.num_nodes=N. With --rdzv-id the run's
# folder is called NAME, so that a restarted job (--max-restarts) finds its checkpoints: ckpt_path=last.
set -euo pipefail
ranks="${RANKS:-2}"
exec torchrun --nproc-per-node "$ranks" -m lightning_dp.app.train "trainer.devices=$ranks" "$@"
