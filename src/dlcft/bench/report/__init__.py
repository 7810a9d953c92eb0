"""Tables, figures and one page from result files, and from nothing else: `read_results`, `summarise`, `to_…`."""

from dlcft.bench.report.page import to_html
from dlcft.bench.report.summary import Row, Spread, read_results, read_traces, summarise
from dlcft.bench.report.tables import reported
from dlcft.bench.report.text import to_csv, to_latex, to_markdown

__all__ = [
    "Row",
    "Spread",
    "read_results",
    "read_traces",
    "reported",
    "summarise",
    "to_csv",
    "to_html",
    "to_latex",
    "to_markdown",
]
