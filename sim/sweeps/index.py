"""SQL over a sweep: a table in memory, made from the segments for each query.

Nothing that is derived from the segments is kept beside them. Whoever hands on a folder could change what was derived
together with its checksum; the segments have to be read to check it, and a table of 10,000 cells takes a second.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from sim.errors import TiersimError
from sim.sweeps.frame import flat_rows
from sim.sweeps.store import Store, StoreError

if TYPE_CHECKING:
    import pandas as pd

READS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
"""What a query may do; all else (ATTACH, VACUUM, PRAGMA, CREATE, …) could write a file or change a setting."""

TIME_LIMIT_S = 60.0
STEPS = 10_000  # of SQLite's machine between two looks at the clock: well under a millisecond


class QueryError(TiersimError):
    """A query that SQLite refuses, that does not read only, or that takes too long."""


def query(store: Store, sql: str, *, time_limit_s: float = TIME_LIMIT_S) -> pd.DataFrame:
    """Rows of a query on the table `cells`, one row per cell; columns are those of the frame, with timing.

    Names with a dot need quotes: `"stall_ns.transfer"`. A query only reads: it changes and creates nothing.

    time_limit_s: how long it may take, the reading of the cells not included; 0 for no limit.

    Raises QueryError; StoreError if a damaged segment leaves an answer in doubt.
    """
    import pandas as pd

    with closing(connect(store)) as connection:
        names, rows = _answer(connection, sql, time_limit_s)
    return pd.DataFrame(rows, columns=names)


def _answer(connection: sqlite3.Connection, sql: str, time_limit_s: float) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The names of the columns, and the rows. Raises QueryError, and KeyboardInterrupt on Ctrl-C."""
    began, denied = time.monotonic(), False

    def is_over() -> bool:
        return 0 < time_limit_s < time.monotonic() - began

    def allow(action: int, *_: str | None) -> int:
        nonlocal denied
        denied = denied or action not in READS
        return sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY

    connection.execute("PRAGMA temp_store = MEMORY")  # a large sort makes no file either
    connection.set_authorizer(allow)
    connection.set_progress_handler(is_over, STEPS)
    try:
        cursor = connection.execute(sql)
        if cursor.description is None:
            raise QueryError("query: expected a SELECT")
        return [column[0] for column in cursor.description], cursor.fetchall()
    except (sqlite3.Error, sqlite3.Warning) as error:
        if denied:
            raise QueryError("query: expected a SELECT: it reads `cells`, and changes or creates nothing") from None
        if str(error) != "interrupted":
            raise QueryError(f"query: {error}") from None
        if is_over():
            raise QueryError(f"query: took longer than {time_limit_s:g} s (--time-limit)") from None
        raise KeyboardInterrupt from None  # SQLite swallows the one that was raised in `is_over`


def connect(store: Store) -> sqlite3.Connection:
    """A connection to a database in memory with the table `cells`.

    Raises StoreError if a damaged segment leaves an answer in doubt.
    """
    connection = sqlite3.connect(":memory:")
    try:
        _fill(connection, store)
    except (sqlite3.Error, ValueError) as error:  # labels that no table has, which this program does not write
        connection.close()
        raise StoreError(f"{store.folder}: cannot be queried: {' '.join(str(error).split())}") from None
    return connection


def _fill(connection: sqlite3.Connection, store: Store) -> None:
    rows = flat_rows(store.whole_rows(), timing=True)
    names = list(rows[0]) if rows else ["cell"]
    columns = ", ".join(_quoted(name) for name in names)
    with connection:
        connection.execute(f"CREATE TABLE cells ({columns})")
        marks = ", ".join("?" * len(names))
        connection.executemany(f"INSERT INTO cells VALUES ({marks})", [[_cell(v) for v in r.values()] for r in rows])


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _cell(value: Any) -> Any:
    is_whole = isinstance(value, int) and abs(value) < 2**63  # SQLite has no larger ones
    return value if value is None or is_whole or isinstance(value, (float, str)) else str(value)
