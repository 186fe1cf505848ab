"""Writes ``conf/strategy/lean_ddp.yaml`` from the options: python -m tests.support.strategy_conf."""

import inspect
import re
import textwrap
from pathlib import Path

import yaml

from lightning_dp import LeanDDPStrategy
from lightning_dp.options import meanings

FILE = Path(__file__).parents[2] / "conf" / "strategy" / "lean_ddp.yaml"
COMMAND = "python -m tests.support.strategy_conf"
_HEAD = f"""\
# Every argument of lightning_dp.LeanDDPStrategy that a config can set, with its default.
# Written from lightning_dp/options.py by {COMMAND}
_target_: lightning_dp.LeanDDPStrategy
"""
_AS_YAML = {"None": "null", "True": "true", "False": "false"}


def strategy_conf() -> str:
    """The file's text."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(LeanDDPStrategy).parameters.items()
        if meanings()[name] != "Set by the Trainer."  # and by nobody else
    }
    return "\n".join([_HEAD, *(_entry(name, default) for name, default in defaults.items())])


def _entry(name: str, default: object) -> str:
    words = re.sub(r"``(.*?)``", _as_yaml, meanings()[name])
    comment = textwrap.fill(
        words, 100, initial_indent="# ", subsequent_indent="# ", break_long_words=False
    )
    value = list(default) if isinstance(default, tuple) else default
    written = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n")
    return f"{comment}\n{name}: {written}"


def _as_yaml(code: re.Match[str]) -> str:
    text = code[1].strip('"') if code[1].startswith('"') else code[1]
    return _AS_YAML.get(text, text)


if __name__ == "__main__":
    FILE.write_text(strategy_conf())
