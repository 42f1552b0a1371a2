"""The report of a benchmark run: one page and its plots from a run folder.

`run_folder` reads, `tables`, `figures` and `outputs` shape, `page` renders. Nothing here measures anything.
"""

from experiments.report.page import write_report

__all__ = ["write_report"]
