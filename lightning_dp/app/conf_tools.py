"""``lean-ddp conf``: see, copy and check the config files.

lean-ddp conf list                      every file, by group, with its first comment
lean-ddp conf show strategy/lean_ddp    one file
lean-ddp conf copy DIR                  all of them, to change
lean-ddp conf check [--config-dir DIR]  compose every choice and compare it with what it names
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_dp.app.findings import Finding, exit_code, show
from lightning_dp.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

USAGE_ERROR = 2


def main(arguments: Sequence[str]) -> int:
    """Run one of the four commands.

    Args:
        arguments: After ``lean-ddp conf``.

    Returns:
        0; 1 if a check failed or a file was not copied; 2 for a name that does not exist.
    """
    options = parser().parse_args(list(arguments))
    if options.command == "list":
        return list_files()
    if options.command == "show":
        return show_file(options.name)
    if options.command == "copy":
        return copy_files(options.folder, force=options.force)
    findings = list(check_files(options.config_dir))
    show(findings, title="lean-ddp conf check", as_json=options.json)
    return exit_code(findings)


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    made = argparse.ArgumentParser(
        prog="lean-ddp conf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="every file, with what it is for")
    showing = commands.add_parser("show", help="print one file")
    showing.add_argument("name", help="group and file as conf list prints them: strategy/lean_ddp")
    copying = commands.add_parser("copy", help="all files into a folder, to change them")
    copying.add_argument("folder", type=Path, help="made if it is not there")
    copying.add_argument(
        "--force", action="store_true", help="write over files that differ (default: they stay)"
    )
    checking = commands.add_parser("check", help="compose every choice, and compare it with code")
    checking.add_argument(
        "--config-dir", type=Path, help="your configs, with ours behind them (default: ours alone)"
    )
    checking.add_argument(
        "--json", action="store_true", help="print a list of findings as JSON (default: lines)"
    )
    return made


def files() -> dict[str, Path]:
    """Every config file, by its name without extension (``strategy/lean_ddp``)."""
    root = Path(str(resources.files("lightning_dp.conf").joinpath("train.yaml"))).parent
    found = sorted(root.rglob("*.yaml"), key=lambda path: (len(path.parts), path))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in found}


def list_files() -> int:
    """Print every file with the first sentence of its comment, wrapped on a terminal."""
    found = files()
    before = max(map(len, found)) + 2
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for name, file in found.items():
        line = f"{name:<{before}}{first_sentence(file.read_text())}"
        if width > before + 20:
            line = textwrap.fill(line, width, subsequent_indent=" " * before)
        print(line)
    return 0


def first_sentence(text: str) -> str:
    """The first sentence of the comment that a YAML file begins with; empty where there is none."""
    comment = []
    for line in text.splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("# "):
            break
        comment.append(line.removeprefix("# "))
    return re.split(r"(?<=[.?!]) (?=[A-Z])", " ".join(comment))[0]


def show_file(name: str) -> int:
    """Print one file as it is."""
    found = files()
    key = name.removesuffix(".yaml")
    if key not in found:
        near = difflib.get_close_matches(key, found, n=1, cutoff=0.4)
        inside = [file for file in found if file.startswith(f"{key.rstrip('/')}/")]
        named = [file for file in found if file.rpartition("/")[2] == key]
        some = inside or named or near
        guess = f" Did you mean {' or '.join(some)}?" if some else ""
        print(
            f"lean-ddp conf show: there is no {name!r}.{guess} (lean-ddp conf list shows all)",
            file=sys.stderr,
        )
        return USAGE_ERROR
    print(found[key].read_text(), end="")
    return 0


def copy_files(folder: Path, *, force: bool) -> int:
    """Copy every file below ``folder``; files that are there already stay, unless forced."""
    kept = []
    if folder.exists() and not folder.is_dir():
        print(f"lean-ddp conf copy: {folder} is a file; name a folder.", file=sys.stderr)
        return 1
    for name, file in files().items():
        target = folder / f"{name}.yaml"
        if target.exists() and not force and target.read_text() != file.read_text():
            kept.append(str(target))
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.read_text())
    print(f"copied to {folder}. Use them with: lean-ddp train --config-dir {folder}")
    for path in kept:
        print(
            f"not copied, it has other contents: {path} (--force writes over it)", file=sys.stderr
        )
    return int(bool(kept))


def check_files(config_dir: Path | None = None) -> Iterator[Finding]:
    """Compose each choice of each group, and each primary config; compare it with what it names.

    Args:
        config_dir: A user's configs; ours are searched behind them.
    """
    if config_dir is not None and not config_dir.is_dir():
        near = difflib.get_close_matches(config_dir.name, _folders(config_dir.parent), n=1)
        guess = f"; did you mean {config_dir.parent / near[0]}?" if near else ""
        what = f"{config_dir} is no folder{guess}"
        yield Finding("FAIL", what, "give the folder that holds train.yaml")
        return
    if config_dir is None:
        yield from _check_each([(name, *_request(name)) for name in files()], None)
        return
    own = sorted(path.relative_to(config_dir) for path in config_dir.rglob("*.yaml"))
    primary = [path.stem for path in own if len(path.parts) == 1]
    if not primary:
        fix = "a primary config (train.yaml) belongs directly into it"
        yield Finding("FAIL", f"{config_dir} holds no config at its top", fix)
    yield from _check_each([(name, name, []) for name in primary], config_dir)


def _folders(parent: Path) -> list[str]:
    return [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []


def _request(name: str) -> tuple[str, list[str]]:
    """The primary config and the overrides that bring file ``name`` in."""
    group, _, option = name.rpartition("/")
    if not group:
        return name, ["ckpt_path=x"] if name == "eval" else []
    extra = ["data=bytes"] if name == "model/bytes" else []  # its model.length is data.length
    return "train", [f"{group}={option}", *extra]


def _check_each(
    requests: Sequence[tuple[str, str, list[str]]], config_dir: Path | None
) -> Iterator[Finding]:
    from hydra.core.hydra_config import HydraConfig

    from lightning_dp.app.arguments import check_arguments

    for name, primary, overrides in requests:
        try:
            check_arguments(_compose(primary, overrides, config_dir))
        except ConfigError as error:
            yield Finding("FAIL", f"{name}: {error}", f"edit {name}.yaml")
        except Exception as error:
            text = " ".join(str(error).split())
            yield Finding("FAIL", f"{name}: {type(error).__name__}: {text}", f"edit {name}.yaml")
        else:
            yield Finding("ok", name)
        finally:
            HydraConfig.instance().cfg = None


def _compose(primary: str, overrides: list[str], config_dir: Path | None) -> DictConfig:
    """Compose as the application would, away from any run's folder."""
    from hydra import compose, initialize_config_dir, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    GlobalHydra.instance().clear()
    where = (
        initialize_config_module("lightning_dp.conf", version_base="1.3")
        if config_dir is None
        else initialize_config_dir(str(config_dir.resolve()), version_base="1.3")
    )
    search = [] if config_dir is None else ["hydra.searchpath=[pkg://lightning_dp.conf]"]
    with where:
        cfg = compose(primary, [*overrides, *search], return_hydra_config=True)
        with open_dict(cfg):
            cfg.hydra.runtime.output_dir = "."
            cfg.hydra.job.id = cfg.hydra.job.num = 0
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
    return cfg
