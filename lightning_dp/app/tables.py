"""Tables on the terminal. Nothing in them is cut: a path can be copied from where it stands."""

from __future__ import annotations

from collections.abc import Iterable


def print_table(title: str, rows: Iterable[tuple[str, str]], styles: Iterable[str] = ()) -> None:
    """Print two columns. What is too long for a terminal is folded; in a pipe nothing is.

    Args:
        title: Printed above.
        rows: Cells as plain text; brackets are no markup.
        styles: For each row the style of its first cell; none by default.
    """
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    style = iter(styles)
    for name, value in rows:
        table.add_row(Text(name, style=next(style, "")), Text(value))
    console = Console()
    if not console.is_terminal:
        wide = console.options.update(width=10_000)
        wanted = Measurement.get(console, wide, table).maximum
        console = Console(width=max(console.width, wanted))
    console.print(table)
