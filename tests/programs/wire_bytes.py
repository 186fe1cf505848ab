"""One rank on a test host: prints the bytes that its interface sent for one bucket, by wire, as JSON."""

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_dp.engine.bucket import Bucket, Slot
from lightning_dp.engine.group import ReplicaGroup
from lightning_dp.engine.wires.all_reduce import AllReduceWire
from lightning_dp.engine.wires.codec import Half, Int8
from lightning_dp.engine.wires.shard import ShardWire

NUMBERS = 6 * 2**20 // 4
TIMES = 4
CODECS = {"shard": None, "bf16": Half(torch.bfloat16), "fp16": Half(torch.float16), "int8": Int8()}


def sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def measure(wire) -> float:
    """Bytes on the interface, as a multiple of the bucket's."""
    slot = Slot(0, "w", nn.Parameter(torch.zeros(NUMBERS)))
    bucket = Bucket(0, [slot], torch.float32, torch.device("cpu"), wire.slicing)
    bucket.allocate()
    slot.view.normal_()
    dist.barrier()
    before = sent()
    for _ in range(TIMES):
        wire.launch(bucket).wait()
    dist.barrier()
    time.sleep(0.2)  # what the kernel still acknowledges
    return (sent() - before) / (TIMES * NUMBERS * 4)


def main() -> None:
    dist.init_process_group("gloo")
    group = ReplicaGroup.create(torch.device("cpu"))
    found = {"all_reduce": measure(AllReduceWire(group))}
    for name, codec in CODECS.items():
        found[name] = measure(ShardWire.connect(group, codec=codec))
    print("SENT", json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
