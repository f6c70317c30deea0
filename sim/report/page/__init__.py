"""The report page: one HTML file that opens without a network, for a run or for a table of many.

    result.report("report.html")
    tiersim report out -o report.html

`run` and `table` say what a page shows, as plain JSON values; `document` puts them, packed, into one file together
with the style and the scripts beside this file. The scripts draw; every name that comes from a user's file reaches
the page as text and nothing else. The chart of memory is drawn by uPlot (MIT), kept in `uplot/` as published.
"""

from sim.report.page.document import write_run_page, write_table_page
from sim.report.page.run import RunView, SavedView
from sim.report.page.table import TableView

__all__ = ["RunView", "SavedView", "TableView", "write_run_page", "write_table_page"]
