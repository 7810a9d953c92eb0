"""Tables, figures and one page from result files, and from nothing else: `read_results`, `summarise`, `to_…`."""

from dlcft.bench.report.page import to_html
from dlcft.bench.report.summary import Row, Spread, read_results, summarise
from dlcft.bench.report.tables import Paper, to_csv, to_latex, to_markdown

__all__ = [
    "Paper",
    "Row",
    "Spread",
    "read_results",
    "summarise",
    "to_csv",
    "to_html",
    "to_latex",
    "to_markdown",
]
