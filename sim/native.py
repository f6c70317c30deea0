"""What mypyc is told of classes that may be compiled; where they are not, nothing.

`mypyc_attr(allow_interpreted_subclasses=True)`: classes in Python may derive from it. `serializable=True`: it and those
may be copied and pickled. `native_class=False`: it stays a class of Python, as dataclasses do. See docs/performance.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**attributes):
        """The class as it is."""
        return lambda decorated: decorated


__all__ = ["mypyc_attr"]
