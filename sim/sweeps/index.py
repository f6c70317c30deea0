"""An index of a sweep's files in SQLite: made from them when asked for, and again when they have changed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import TiersimError
from sim.sweeps.frame import flat_rows
from sim.sweeps.store import FORMAT, Store

if TYPE_CHECKING:
    import pandas as pd


class QueryError(TiersimError):
    """A query that SQLite refuses."""


def query(store: Store, sql: str) -> pd.DataFrame:
    """Rows of a query on the table `cells`, one row a cell; columns are those of the frame, with timing.

    Names with a dot need quotes: `"stall_ns.transfer"`. Nothing can be changed. Raises QueryError.
    """
    import pandas as pd

    with closing(connect(store)) as connection:
        connection.execute("PRAGMA query_only = ON")
        try:
            cursor = connection.execute(sql)
            if cursor.description is None:
                raise QueryError("query: expected a SELECT")
            return pd.DataFrame(cursor.fetchall(), columns=[column[0] for column in cursor.description])
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise QueryError(f"query: {error}") from None


def connect(store: Store) -> sqlite3.Connection:
    """A connection to an index that is up to date: the file, or one in memory where none can be written."""
    path = store.folder / "index.sqlite"
    wanted = _stamp(store)
    for attempt in ("as it is", "made anew"):
        try:
            if attempt == "made anew":
                for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
                    name.unlink(missing_ok=True)
            connection = sqlite3.connect(path)
            try:
                _journal(connection)
                if not _is_current(connection, wanted):
                    _fill(connection, store, wanted)
                return connection
            except BaseException:
                connection.close()
                raise
        except (sqlite3.Error, OSError):  # damaged, of another program, or in a folder that cannot be written
            continue
    connection = sqlite3.connect(":memory:")
    _fill(connection, store, wanted)
    return connection


def _journal(connection: sqlite3.Connection) -> None:
    """Write-ahead log, or a rollback journal on file systems that cannot share memory."""
    try:
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
    except sqlite3.OperationalError:
        connection.execute("PRAGMA journal_mode = DELETE").fetchone()


def _stamp(store: Store) -> str:
    """What the files are: names, sizes and times; made anew whenever it differs."""
    files = [store.folder / "study.json", *store.segments]
    return repr((FORMAT, [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]))


def _is_current(connection: sqlite3.Connection, wanted: str) -> bool:
    try:
        found = connection.execute("SELECT stamp FROM made_from").fetchone()
    except sqlite3.OperationalError:
        return False
    return found is not None and found[0] == wanted


def _fill(connection: sqlite3.Connection, store: Store, stamp: str) -> None:
    rows = flat_rows(store.rows(), timing=True)
    names = list(rows[0]) if rows else ["cell"]
    columns = ", ".join(_quoted(name) for name in names)
    with connection:
        connection.execute("DROP TABLE IF EXISTS cells")
        connection.execute("DROP TABLE IF EXISTS made_from")
        connection.execute(f"CREATE TABLE cells ({columns})")
        marks = ", ".join("?" * len(names))
        connection.executemany(f"INSERT INTO cells VALUES ({marks})", [[_cell(v) for v in r.values()] for r in rows])
        connection.execute("CREATE TABLE made_from (stamp)")
        connection.execute("INSERT INTO made_from VALUES (?)", (stamp,))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float, str)) else str(value)
