"""``lean-ddp conf``: see, copy and check the config files.

lean-ddp conf list                      every file, by group, with its first comment
lean-ddp conf show strategy/lean_ddp    one file
lean-ddp conf copy DIR                  all of them, to change
lean-ddp conf check [--config-dir DIR]  compose train.yaml and eval.yaml, compare them with code
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

from lightning_dp.app.findings import Finding, add_json_option, report
from lightning_dp.app.parsing import add_options, advice, nearest
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
    return report(check_files(options.config_dir), as_json=options.json)


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
    add_options(copying, ("--force", bool, False, "write over files that differ", "they stay"))
    checking = commands.add_parser(
        "check", help="compose each config at the top, and compare it with code"
    )
    what = "your configs, with ours behind them"
    add_options(checking, ("--config-dir", Path, None, what, "ours alone"))
    add_json_option(checking)
    return made


def _root() -> Path:
    return Path(str(resources.files("lightning_dp.conf").joinpath("train.yaml"))).parent


def files() -> dict[str, Path]:
    """Every config file, by its name without extension (``strategy/lean_ddp``)."""
    found = sorted(_root().rglob("*.yaml"), key=lambda path: (len(path.parts), path))
    return {path.relative_to(_root()).with_suffix("").as_posix(): path for path in found}


def list_files() -> int:
    """Print every file with the first sentence of its comment, wrapped on a terminal."""
    found = files()
    before = max(map(len, found)) + 2
    width = max(before + 20, shutil.get_terminal_size(fallback=(9999, 0)).columns)
    for name, file in found.items():
        line = f"{name:<{before}}{first_sentence(file.read_text())}"
        print(textwrap.fill(line, width, subsequent_indent=" " * before))
    return 0


def first_sentence(text: str) -> str:
    """The first sentence of the comment that a YAML file begins with; empty where there is none."""
    comment = re.match(r"(?:# @package.*\n)?((?:# .*\n)*)", text)
    text = comment[1].replace("\n# ", " ").removeprefix("# ").strip() if comment else ""
    return re.split(r"(?<=[.?!]) (?=[A-Z])", text)[0]


def show_file(name: str) -> int:
    """Print one file as it is."""
    found = files()
    key = name.removesuffix(".yaml")
    if key not in found:
        near = [file for file in found if file.rpartition("/")[0] == key.rstrip("/")]
        near = near or [file for file in found if file.rpartition("/")[2] == key]
        near = near or difflib.get_close_matches(key, found, n=1, cutoff=0.4)
        text = f"there is no {name!r}.{advice(near)} (lean-ddp conf list shows all)"
        print(f"lean-ddp conf show: {text}", file=sys.stderr)
        return USAGE_ERROR
    print(found[key].read_text(), end="")
    return 0


def copy_files(folder: Path, *, force: bool) -> int:
    """Copy every file below ``folder``; files that are there already stay, unless forced."""
    code = 0
    if folder.exists() and not folder.is_dir():
        print(f"lean-ddp conf copy: {folder} is a file; name a folder.", file=sys.stderr)
        return 1
    for name, file in files().items():
        target = folder / f"{name}.yaml"
        if target.exists() and not force and target.read_text() != file.read_text():
            text = f"not copied, it has other contents: {target} (--force writes over it)"
            print(text, file=sys.stderr)
            code = 1
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.read_text())
    print(f"copied to {folder}. Use them with: lean-ddp train --config-dir {folder}")
    return code


def check_files(config_dir: Path | None = None) -> Iterator[Finding]:
    """Compose each primary config; compare it with what it names.

    Args:
        config_dir: A user's configs, with ours behind them; ours alone by default.
    """
    from hydra.core.hydra_config import HydraConfig

    from lightning_dp.app.arguments import check_arguments

    if config_dir is not None and not config_dir.is_dir():
        beside = config_dir.parent.glob("*/")
        near = advice(
            nearest(config_dir.name, [path.name for path in beside], f"{config_dir.parent}/")
        )
        what = f"{config_dir} is no folder.{near}"
        yield Finding("FAIL", what, "give the folder that holds train.yaml")
        return
    primary = sorted(path.stem for path in (config_dir or _root()).glob("*.yaml"))
    if not primary:
        fix = "a primary config (train.yaml) belongs directly into it"
        yield Finding("FAIL", f"{config_dir} holds no config at its top", fix)
    for name in primary:
        try:
            check_arguments(_compose(name, config_dir))
        except Exception as error:
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            what = f"{name}: {kind}{' '.join(str(error).split())}"
            yield Finding("FAIL", what, f"edit {name}.yaml")
        else:
            yield Finding("ok", name)
        finally:
            HydraConfig.instance().cfg = None


def _compose(primary: str, config_dir: Path | None) -> DictConfig:
    """Compose as the application would, away from any run's folder."""
    from hydra import compose, initialize_config_dir, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    known_in_a_run = ["hydra.runtime.output_dir=.", "hydra.job.id=0", "hydra.job.num=0"]
    search = [] if config_dir is None else ["hydra.searchpath=[pkg://lightning_dp.conf]"]
    GlobalHydra.instance().clear()
    where = (
        initialize_config_module("lightning_dp.conf", version_base="1.3")
        if config_dir is None
        else initialize_config_dir(str(config_dir.resolve()), version_base="1.3")
    )
    with where:
        cfg = compose(primary, [*known_in_a_run, *search], return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    return cfg
