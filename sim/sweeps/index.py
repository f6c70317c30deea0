"""An index of a sweep's files in SQLite: derived from them, and used only while it agrees with them.

The segments hold the results, each line with its checksum. The index is built from them on request, and rebuilt
whenever they, or the index itself, have changed by a single byte.
"""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sim.errors import TiersimError
from sim.foreign import read_file
from sim.report.files import write_aside
from sim.sweeps.frame import flat_rows
from sim.sweeps.store import FORMAT, Store, StoreError

if TYPE_CHECKING:
    import pandas as pd


class QueryError(TiersimError):
    """A query that SQLite refuses."""


def query(store: Store, sql: str) -> pd.DataFrame:
    """Rows of a query on the table `cells`, one row per cell; columns are those of the frame, with timing.

    Names with a dot need quotes: `"stall_ns.transfer"`. Access is read-only. Raises QueryError.
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
    """A connection to an index in memory that agrees with the files: read from its own file, or rebuilt.

    Its file is used only if it is intact and was built from exactly the present bytes of the results. The bytes that
    were hashed are the bytes that are queried, so that damage of the disk in between has no effect.

    Raises StoreError if a damaged segment leaves an answer in doubt.
    """
    path, sum_path = store.folder / "index.sqlite", store.folder / "index.sum"
    stamp = _stamp(store)
    connection = sqlite3.connect(":memory:")
    try:
        image = read_file(path)
        if read_file(sum_path) == _sum(stamp, image):
            connection.deserialize(image)
            return connection
    except (OSError, TiersimError, sqlite3.Error):  # missing, unreadable, or no file at all
        connection.close()
        connection = sqlite3.connect(":memory:")
    try:
        _fill(connection, store)
    except (sqlite3.Error, ValueError) as error:  # labels that no table has, which this program does not write
        raise StoreError(f"{store.folder}: cannot be indexed: {' '.join(str(error).split())}") from None
    image = connection.serialize()
    with suppress(OSError):  # a folder that cannot be written: the index is made for this query alone
        _write(path, image)
        _write(sum_path, _sum(stamp, image))
    return connection


def _write(path: Path, content: bytes) -> None:
    def write(file: IO[bytes]) -> None:
        file.write(content)

    write_aside(path, write)


def _stamp(store: Store) -> bytes:
    """A hash of the files' names and of every byte."""
    whole = hashlib.sha256(b"%d" % FORMAT)
    for file in (store.folder / "study.json", *store.segments):
        whole.update(b"%s %s" % (file.name.encode(), hashlib.sha256(file.read_bytes()).digest()))
    return whole.digest()


def _sum(stamp: bytes, image: bytes) -> bytes:
    """The text of an index's checksum file: hashes of the index and of the files from which it was built."""
    return hashlib.sha256(stamp + image).hexdigest().encode() + b"\n"


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
