"""Libraries that train through Lightning: does ``lean_ddp`` train what ``ddp`` and one device do?

    python -m benchmarks.libraries                       # all of the table, one after the other
    python -m benchmarks.libraries darts chemprop        # these

Each library is installed into an environment of its own, over the one that runs (its torch and Lightning
stay), and its own model (``library_models.py``) is trained on the same seed three times: on one device, and
on two ranks with ``ddp`` and with ``lean_ddp``. The table holds the largest difference of a weight. Needs a
package index.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.library_models import LIBRARIES, Library

ROOT = Path(__file__).parents[1]
KEPT = ("torch", "lightning", "pytorch-lightning")
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
HEAD = (
    "library", "version", "Trainer of", "`ddp` to one device", "`lean_ddp` to one device",
    "`lean_ddp` to `ddp`", "the strategy is given as", "note",
)  # fmt: skip

Weights = dict[str, torch.Tensor]


def train(name: str, strategy: str, devices: int, out: Path) -> None:
    """One run, inside of the library's environment: each rank leaves weights and package in ``out``."""
    import lightning_dp  # noqa: F401
    from lightning_dp.internals import binding

    before: dict[torch.Tensor, torch.Tensor] = {}

    def remember(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
            before.setdefault(weight, weight.detach().clone())

    register_optimizer_step_pre_hook(remember)
    torch.manual_seed(1)
    module = LIBRARIES[name].train({**QUIET, "strategy": strategy, "devices": devices})
    if all(torch.equal(weight, before.get(weight, weight)) for weight in module.parameters()):
        raise RuntimeError("no weight of the module has changed")
    rank = int(os.environ.get("LOCAL_RANK", 0))
    weights = {key: value.detach() for key, value in module.named_parameters()}
    torch.save((weights, binding.package_of(type(module))), out.with_suffix(f".{rank}"))


def environment(row: Library, folder: Path) -> Path:
    """Install a library over this environment; returns its Python."""
    python = folder / "env" / "bin" / "python"
    venv.create(folder / "env", with_pip=False, symlinks=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = folder / "env" / "lib" / version / "site-packages"
    (site / "below.pth").write_text("\n".join(sites()))
    versions = {each: metadata.version(each).partition("+")[0] for each in KEPT}
    kept = folder / "kept.txt"
    kept.write_text("\n".join(f"{each}=={version}" for each, version in versions.items()))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "-c", kept]
    own = {"torch": f"torch==={versions['torch']}"}  # three signs: without a local label, as +cpu
    subprocess.run([*pip, *(own.get(word, word) for word in row.requirement.split())], check=True)
    return python


def sites() -> list[str]:
    """Where this environment's packages lie."""
    here = sysconfig.get_paths()["purelib"]
    return [here, *(path for path in sys.path if path.endswith("site-packages") and path != here)]


def run(row: Library, folder: Path) -> list[str]:
    """One row of the table: what was installed, and how far apart the weights are."""
    folder.mkdir(parents=True, exist_ok=True)
    python = environment(row, folder)
    ask = f"from importlib.metadata import version; print(version({row.name!r}))"
    version = subprocess.check_output([python, "-c", ask], text=True).strip()
    one, package = trained(row.name, "auto", 1, python, folder)
    if isinstance(one, str):  # nothing of ours has a part in it
        return [row.name, version, "", f"does not train on one device: {one}", "", "", "", ""]
    ddp, lean = (
        trained(row.name, strategy, 2, python, folder)[0] for strategy in (row.ddp, "lean_ddp")
    )
    figures = [apart(ddp, one), apart(lean, one), apart(lean, ddp)]
    return [row.name, version, f"`{package}`", *figures, row.given, row.note]


def trained(
    name: str, strategy: str, devices: int, python: Path, folder: Path
) -> tuple[Weights | str, str]:
    """The weights, or the last line of a run that failed; and the package that the module is of."""
    out = folder / strategy
    for old in folder.glob(f"{strategy}.?"):
        old.unlink()
    given = ["--train", name, strategy, str(devices), out]
    done = subprocess.run(
        [python, "-m", "benchmarks.libraries", *given], cwd=folder, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    (folder / f"{strategy}.log").write_text(done.stdout)
    if done.returncode:
        return (done.stdout.strip().splitlines() or [""])[-1][:120], ""
    ranks = [torch.load(out.with_suffix(f".{rank}")) for rank in range(devices)]
    if any(apart(weights, ranks[0][0]) != "0" for weights, _ in ranks):
        return "ranks differ", ""
    return ranks[0]


def apart(a: Weights | str, b: Weights | str) -> str:
    """The largest difference of a weight, or why there is none."""
    if isinstance(a, str) or isinstance(b, str):
        return next(each for each in (a, b) if isinstance(each, str))
    assert a.keys() == b.keys()
    differences = [(a[name] - b[name]).abs().max() for name in a if a[name].numel()]
    most = torch.stack(differences).max().item()
    return f"{most:.1e}" if most else "0"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(LIBRARIES)}")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/libraries"), help="environments and logs"
    )
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        name, strategy, devices, out = options.train
        train(name, strategy, int(devices), Path(out))
        return
    print(f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|")
    for name in options.names or LIBRARIES:
        try:
            row = run(LIBRARIES[name], (options.folder / name).absolute())
        except subprocess.CalledProcessError:
            row = [name, "cannot be installed here", *[""] * (len(HEAD) - 2)]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
