"""Every error that the library raises.

RunOnceError
├── ConfigError          a RUNONCE_… setting is unknown or makes no sense (also a ValueError)
├── InvalidKey           an ID is not what CONTRACT section 4 allows
└── StoreError
    ├── StoreUnavailable the store cannot be reached, or did not answer in time
    ├── StoreFull        the store has no room for another record
    ├── UnreadableRecord what the store holds under a key is not a record of this version
    └── WrongTable       the database has a table of another version
"""

from __future__ import annotations


class RunOnceError(Exception):
    """The root of the tree."""


class ConfigError(RunOnceError, ValueError):
    """A setting is unknown or makes no sense. `name` is the setting's name."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name = name


class InvalidKey(RunOnceError):
    """An ID is malformed. `what` names the ID ("chat ID"), `problem` completes the sentence "The chat ID …"."""

    def __init__(self, what: str, problem: str) -> None:
        super().__init__(f"The {what} {problem}.")
        self.what = what
        self.problem = problem


class StoreError(RunOnceError):
    """A store could not do what it was asked."""


class StoreUnavailable(StoreError):
    """The store cannot be reached. Whether the verb took effect is not known."""


class StoreFull(StoreError):
    """The store has no room for another record; nothing was written."""


class UnreadableRecord(StoreError):
    """The stored bytes are not a record that this version can read. It is never taken for "no record"."""


class WrongTable(StoreError):
    """The database holds a table of another version. `table` is its name, `found` the version that it says."""

    def __init__(self, table: str, found: str) -> None:
        super().__init__(f"The table {table!r} is of version {found!r}, which this release cannot use.")
        self.table = table
        self.found = found
