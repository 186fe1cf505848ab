"""Memory of gradients and buckets, counted by torch's allocator: after a step, and the most in a backward.

    python -m benchmarks.memory --models mlp transformer

Every allocation of one rank is recorded from before the module is made. "Held" is what lives between two
steps besides the module and its batch; "peak" is the most that lives during a backward, activations
included, over the same. Both are given in units of the gradients' bytes; ``alone`` trains without any
synchronisation and shows what gradients and activations need by themselves. Plain SGD, so no optimizer
state is in the way. Nothing here is timed.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from contextlib import ExitStack, contextmanager
from unittest import mock

import lightning.pytorch as pl
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.models import job
from benchmarks.step_time import bare_trainer, launch, quiet

MIB = 2**20
STEPS = 6  # the bucket layout is final by then
MARKS = ("made", "forward", "backward", "after backward", "stepped")


@contextmanager
def unhurried():
    """Let gloo's thread drop a tensor before this one does.

    The profiler sees what the recorded thread frees. After a blocking collective, gloo's thread may hold
    the tensor for some microseconds more, and what it frees then would count as alive for ever.
    """

    def patient(function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            time.sleep(0.005)
            return result

        return call

    names = ("broadcast", "all_reduce", "all_gather", "barrier")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, patient(getattr(dist, name))))
        yield


class Marks(pl.Callback):
    """Names the moments of the last step in the trace."""

    def _mark(self, trainer, name):
        if trainer.global_step == STEPS - 1 or (name == "stepped" and trainer.global_step == STEPS):
            with record_function(name):
                pass

    def on_train_batch_start(self, trainer, *_):
        self._mark(trainer, "forward")

    def on_before_backward(self, trainer, *_):
        self._mark(trainer, "backward")

    def on_after_backward(self, trainer, *_):
        self._mark(trainer, "after backward")

    def on_train_batch_end(self, trainer, *_):
        self._mark(trainer, "stepped")


def live_bytes(trace) -> dict[str, tuple[int, int]]:
    """Return for each mark the bytes alive then, and the most alive until the next mark."""
    events = [
        (event.start_ns(), event.name(), event.nbytes() if event.name() == "[memory]" else 0)
        for event in trace.profiler.kineto_results.events()
        if event.name() == "[memory]" or event.name() in MARKS
    ]
    live, current, found = 0, None, {}
    for _, name, nbytes in sorted(events, key=lambda event: event[0]):
        live += nbytes
        if name in MARKS:
            current = name
            found[current] = (live, live)
        elif current is not None:
            at, most = found[current]
            found[current] = (at, max(most, live))
    return found


def traced_fit(name: str, model: str, world_size: int) -> tuple[int, int, int]:
    """Train a few steps as one rank; return bytes of gradients, held bytes, peak bytes in a backward."""
    gc.collect()  # what an earlier fit left must not be freed in this one
    with unhurried(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        module = job(model)
        with record_function("made"):
            pass
        trainer = bare_trainer(name, world_size, Marks())
        trainer.fit(module, module.loader(STEPS))
    live = live_bytes(trace)
    made = live["made"][0]
    gradients = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    return gradients, live["stepped"][0] - made, live["backward"][1] - made


def measure(args) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    environment = dict(os.environ)
    if rank == 0:
        print(f"{'model':12} {'strategy':34} {'gradients':>10} {'held':>7} {'peak':>7}")
    for model in args.models:
        for name in args.contenders:
            os.environ.update(environment)  # Lightning's environment forgets its variables
            gradients, held, peak = traced_fit(name, model, world_size)
            if rank == 0:
                print(
                    f"{model:12} {name:34} {gradients / MIB:6.1f} MiB"
                    f" {held / gradients:6.2f}x {peak / gradients:6.2f}x",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=["small", "mlp", "transformer", "gpt"])
    parser.add_argument(
        "--contenders",
        nargs="+",
        default=["ddp", "ddp:gradient_as_bucket_view=true", "lean", "alone"],
    )
    args = parser.parse_args()
    if "RANK" not in os.environ:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines
        launch(args)
    with quiet():
        measure(args)


if __name__ == "__main__":
    main()
