"""Kill ranks at random moments, many times; see that everything ends, is explained, and resumes exactly.

    python -m benchmarks.kill_test [--trials 100] [--programs 10] [--seed 0]

A trial draws how many ranks (two or three), which one fails, at which moment and how. Then:

* every process has ended by itself within 15 s of the fault (nobody is ended by this script);
* what the other ranks report names the rank that failed; a rank asked to stop (SIGTERM) stops all with 143;
* a second attempt resumes from the last checkpoint, and by the end each sample of each epoch was trained on
  exactly once: counted from what had been trained on when that checkpoint was made.

Most trials fork their ranks, as an external launcher would start them; ``--programs`` of them run the whole
program, with the ranks started by ``lean_ddp``, and the ranks must leave no process behind.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import kill_training
from benchmarks.kill_training import MOMENTS, SAMPLES, WAYS, Spec
from benchmarks.models import free_port

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 15.0
START_LIMIT_S = 90.0
MARK = "LEAN_DDP_KILL_TEST"


@dataclasses.dataclass
class Outcome:
    """What one trial showed; ``problems`` is empty when all was as it must be."""

    spec: Spec
    program: bool
    seconds: float
    problems: list[str]


def draw(rng: random.Random, root: str, index: int) -> Spec:
    """A random trial."""
    world_size = rng.choice((2, 3))
    moment = rng.choice(MOMENTS)
    victim = 0 if moment == "write" else rng.randrange(world_size)  # rank 0 writes
    return Spec(
        root=root,
        world_size=world_size,
        attempt=0,
        victim=victim,
        moment=moment,
        way=rng.choice(WAYS),
        step=rng.randrange(0, 12),
        seed=index,
        workers=rng.choice((0, 0, 2)),
        every=rng.choice((0, 0, 5)),
        wire=rng.choice(("auto", "auto", "fp32", "bf16", "int8")),
    )


def fork_ranks(spec: Spec, token: str) -> dict[int, int]:
    """Run one attempt on forked ranks; return their process numbers by rank."""
    port = free_port()
    pids = {}
    for rank in range(spec.world_size):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(spec.world_size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            with open(spec.folder / f"output.{spec.attempt}.{rank}", "w") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            _be_rank(spec)
        pids[rank] = pid
    return pids


def _be_rank(spec: Spec) -> None:
    import traceback

    from lightning_dp.launch import job as jobs

    code = 1
    try:
        torch.set_num_threads(1)
        from lightning.pytorch.plugins.environments import LightningEnvironment

        from lightning_dp import LeanDDPStrategy

        environment = LightningEnvironment()
        kill_training.train(spec, LeanDDPStrategy(cluster_environment=environment, **spec.options))
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        current = jobs.current()
        if current is not None:
            current.at_exit()  # what the end of a program does; the other handlers are the parent's
        sys.stderr.flush()
        os._exit(code)


def wait_for(pids: dict[int, int], folder: Path) -> tuple[dict[int, int], float, list[str]]:
    """Wait until all have ended by themselves, ``LIMIT_S`` after the fault at most."""
    codes: dict[int, int] = {}
    problems: list[str] = []
    begin = time.time()
    while len(codes) < len(pids):
        for rank, pid in pids.items():
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        fault = _fault_time(folder)
        late = fault is not None and time.time() > fault + LIMIT_S
        if late or time.time() > begin + START_LIMIT_S:
            left = sorted(set(pids) - set(codes))
            problems.append(f"rank(s) {left} had not ended")
            for rank in left:
                os.kill(pids[rank], signal.SIGKILL)
                os.waitpid(pids[rank], 0)
                codes[rank] = -signal.SIGKILL
        time.sleep(0.01)
    fault = _fault_time(folder)
    return codes, time.time() - (fault if fault is not None else begin), problems


def _fault_time(folder: Path) -> float | None:
    file = folder / "fault"
    text = file.read_text() if file.exists() else ""
    return float(text) if text else None


def run_program(spec: Spec, token: str) -> tuple[int, float, list[str]]:
    """Run one attempt as a program; return its code, seconds since the fault and problems."""
    file = spec.folder / f"spec.{spec.attempt}.json"
    file.write_text(kill_training.to_json(spec))
    env = {**os.environ, MARK: token, "OMP_NUM_THREADS": "1"}
    output = spec.folder / f"output.{spec.attempt}"
    with output.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.kill_training", str(file)],
            cwd=ROOT,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    begin = time.time()
    problems: list[str] = []
    while process.poll() is None or _marked(token):
        fault = _fault_time(spec.folder) if spec.attempt == 0 else None
        late = fault is not None and time.time() > fault + LIMIT_S
        if late or time.time() > begin + START_LIMIT_S:
            problems.append("processes were left behind")
            for pid in _marked(token):
                os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()
            break
        time.sleep(0.05)
    fault = _fault_time(spec.folder)
    return process.wait(), time.time() - (fault if fault is not None else begin), problems


def _marked(token: str) -> list[int]:
    """Living processes that inherited ``token``."""
    wanted = f"{MARK}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            ours = entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0")
            if ours and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def check_report(spec: Spec, codes: dict[int, int]) -> list[str]:
    """Whether the ranks that did nothing wrong name the one that did."""
    problems = []
    if spec.way == "SIGTERM":
        if set(codes.values()) != {143}:
            problems.append(f"exit codes {codes} instead of 143")
        return problems
    for rank in range(spec.world_size):
        file = spec.folder / f"error.0.{rank}"
        told = json.loads(file.read_text()) if file.exists() else None
        if rank == spec.victim:
            if spec.way == "exception" and (told or {}).get("type") != "ValueError":
                problems.append(f"rank {rank} lost its own error: {told}")
        elif told is None or told["rank"] != spec.victim:
            problems.append(f"rank {rank} names {told} and not rank {spec.victim}")
    return problems


def _noted(spec: Spec, attempt: int) -> list[tuple[int, int, int]]:
    """(epoch, step, sample) of all ranks."""
    entries = []
    for rank in range(spec.world_size):
        file = spec.folder / f"samples.{attempt}.{rank}"
        for line in file.read_text().splitlines() if file.exists() else ():
            epoch, step, samples = json.loads(line)
            entries += [(epoch, step, sample) for sample in samples]
    return entries


def _count(spec: Spec, kept: list[tuple[int, int, int]]) -> list[str]:
    """Complete ``kept`` by the second attempt and count."""
    counts = collections.Counter((epoch, sample) for epoch, _, sample in kept + _noted(spec, 1))
    wanted = {(epoch, sample) for epoch in range(kill_training.EPOCHS) for sample in range(SAMPLES)}
    missing = sorted(wanted - set(counts))
    repeated = sorted(key for key, count in counts.items() if count != 1)
    problems = []
    if missing:
        problems.append(f"{len(missing)} samples never trained on, such as {missing[:3]}")
    if repeated:
        problems.append(
            f"{len(repeated)} samples trained on more than once, such as {repeated[:3]}"
        )
    return problems


def trial(spec: Spec, *, program: bool) -> Outcome:
    """Fail, look, resume, count."""
    token = f"{os.getpid()}-{spec.seed}"
    if program:
        code, seconds, problems = run_program(spec, token)
        codes = dict.fromkeys(range(spec.world_size), code)
        if spec.way == "SIGTERM":
            problems += check_report(spec, codes)
        elif spec.way == "exit" and spec.victim != 0 and code != 7:
            problems.append(f"exit code {code} instead of the first failing rank's 7")
        if not (spec.way == "SIGKILL" and spec.victim == 0) and spec.way != "SIGTERM":
            output = (spec.folder / "output.0").read_text()
            if spec.victim != 0 and f"rank {spec.victim} " not in output:
                problems.append(f"the output does not name rank {spec.victim}")
    else:
        codes, seconds, problems = wait_for(fork_ranks(spec, token), spec.folder)
        problems += check_report(spec, codes)
    if _fault_time(spec.folder) is None:
        problems.append("the fault never happened")
    last = sorted(spec.folder.glob("last*.ckpt"), key=lambda path: path.stat().st_mtime)
    return_to = torch.load(last[-1], weights_only=False)["global_step"] if last else 0
    kept = [entry for entry in _noted(spec, 0) if entry[1] <= return_to]
    again = dataclasses.replace(spec, attempt=1, victim=-1)
    (spec.folder / "fault").unlink(missing_ok=True)
    if program:
        code, _, left = run_program(again, token)
        done = [code] if code else []
    else:
        codes, _, left = wait_for(fork_ranks(again, token), spec.folder)
        done = [code for code in codes.values() if code]
    problems += [f"resuming ended with {done}"] if done else []
    problems += left + _count(again, kept)
    return Outcome(spec, program, seconds, problems)


def summarize(outcomes: list[Outcome]) -> str:
    """The table: for each moment and way, how many of how many were right, and the slowest end."""
    lines = [f"{'moment':<12}" + "".join(f"{way:>16}" for way in WAYS)]
    for moment in MOMENTS:
        cells = []
        for way in WAYS:
            here = [o for o in outcomes if o.spec.moment == moment and o.spec.way == way]
            good = sum(not o.problems for o in here)
            slowest = max((o.seconds for o in here), default=0.0)
            cells.append(f"{good}/{len(here)} {slowest:5.1f} s" if here else "-")
        lines.append(f"{moment:<12}" + "".join(f"{cell:>16}" for cell in cells))
    bad = [outcome for outcome in outcomes if outcome.problems]
    right = len(outcomes) - len(bad)
    slowest = max((o.seconds for o in outcomes), default=0.0)
    lines.append(
        f"{right} of {len(outcomes)} trials as they must be ({sum(o.program for o in outcomes)} whole "
        f"programs); the slowest end {slowest:.1f} s after its fault"
    )
    for outcome in bad:
        lines.append(f"  {outcome.spec}: {'; '.join(outcome.problems)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--programs", type=int, default=10, help="how many run the whole program")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", type=int, help="only the trial of this number, kept for looking at"
    )
    parser.add_argument("--out", type=Path, help="write the table here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(options.seed)
    whole = set(rng.sample(range(options.trials), min(options.programs, options.trials)))
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="kill-test-") as tmp:
        for index in range(options.trials):
            folder = Path(tmp) / str(index)
            spec = draw(rng, str(folder), index)
            if options.only is not None and index != options.only:
                continue
            folder.mkdir()
            outcome = trial(spec, program=index in whole)
            outcomes.append(outcome)
            state = "ok" if not outcome.problems else "; ".join(outcome.problems)
            kind = "program" if outcome.program else "forked"
            print(
                f"{index:>3} {kind:<7} {spec.world_size} ranks, {spec.workers} workers: rank "
                f"{spec.victim} {spec.way} in {spec.moment} from step {spec.step}: "
                f"{outcome.seconds:.1f} s, {state}",
                flush=True,
            )
            if options.only is not None:
                for file in sorted(folder.glob("output*")):
                    print(f"--- {file.name}\n{file.read_text()}")
        table = summarize(outcomes)
    print(table)
    if options.out is not None:
        options.out.write_text(table + "\n")
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
