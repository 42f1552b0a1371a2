"""A table as text for a terminal and as Markdown."""
import dataclasses


@dataclasses.dataclass(frozen=True)
class Table:
  """A title, the names of columns, and rows of cells as text."""
  title: str
  columns: tuple[str, ...]
  rows: list[tuple[str, ...]]

  def text(self) -> str:
    """Columns padded, all but the first to the right."""
    widths = [max(map(len, column)) for column in zip(self.columns, *self.rows)]
    pad = lambda i, cell: cell.rjust(widths[i]) if i else cell.ljust(widths[i])
    line = lambda cells: "  ".join(pad(*each) for each in enumerate(cells))
    return "\n".join([self.title, line(self.columns), "-" * len(line(self.columns)), *map(line, self.rows)])

  def markdown(self) -> str:
    """As GitHub reads it."""
    line = lambda cells: f"| {' | '.join(cells)} |"
    return "\n".join([self.title + ":", "", line(self.columns), line(["---"] + ["---:"] * (len(self.columns) - 1)),
                      *map(line, self.rows)])
