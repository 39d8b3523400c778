"""The table of recipes in a namespace: `recipe(id, record, base, uses)`. docs/format.md says what the columns mean.

A record is made on the recipe of the version before it where that saves at least half. A base stands alone, so a recipe
takes two rows at most. A row goes with its last use: a version, an era of a journal, or a recipe that was made on it.

Statements on a connection that the caller owns; those that change something belong inside his transaction.
"""

from collections.abc import Iterator

import apsw

from deltapool.cas.recipe import DamagedRecipe, Recipe, decode, encode, needs_base

_BATCH = 1_000


class Recipes:
    def __init__(self, connection: apsw.Connection) -> None:
        self._execute = connection.execute
        self._connection = connection

    def add(self, recipe: Recipe, near: int | None) -> int:
        """A new row, without a use. `near` is a recipe that it may be like."""
        record, base = encode(recipe), None
        candidate = None if near is None else self._base_of(near)
        if candidate is not None:
            on_base = encode(recipe, self.load(candidate))
            if 2 * len(on_base) <= len(record):
                record, base = on_base, candidate
        self._execute("INSERT INTO recipe(record, base, uses) VALUES (?, ?, 0)", (record, base))
        added = self._connection.last_insert_rowid()
        if base is not None:
            self.use(base)
        return added

    def _base_of(self, near: int) -> int | None:
        """The recipe that stands alone and that `near` is or was made on; None if it is not there any more."""
        row = self._execute("SELECT coalesce(base, id) FROM recipe WHERE id = ?", (near,)).fetchone()
        return None if row is None else int(row[0])

    def load(self, number: int) -> Recipe:
        """Raises DamagedRecipe if it is not there, or not whole."""
        row = self._execute("SELECT record, base FROM recipe WHERE id = ?", (number,)).fetchone()
        if row is None:
            raise DamagedRecipe(f"recipe {number} is missing")
        try:
            return self._decoded(*row)
        except DamagedRecipe as error:
            raise DamagedRecipe(f"recipe {number}: {error}") from None

    def _decoded(self, record: bytes, base: int | None) -> Recipe:
        if not needs_base(record):
            return decode(record)
        row = self._execute("SELECT record FROM recipe WHERE id = ?", (base,)).fetchone()
        if row is None:
            raise DamagedRecipe(f"its base {base} is missing")
        return decode(record, decode(row[0]))

    def use(self, number: int) -> None:
        self._execute("UPDATE recipe SET uses = uses + 1 WHERE id = ?", (number,))

    def drop(self, number: int) -> None:
        """One use less; with the last one the row goes."""
        row = self._execute("UPDATE recipe SET uses = uses - 1 WHERE id = ? RETURNING uses, base", (number,)).fetchone()
        if row is not None and row[0] <= 0:
            self._execute("DELETE FROM recipe WHERE id = ?", (number,))
            if row[1] is not None:
                self.drop(row[1])

    def all(self) -> Iterator[tuple[int, Recipe]]:
        """Every recipe, in portions. Raises DamagedRecipe."""
        after = 0
        while rows := self._execute(
            "SELECT id FROM recipe WHERE id > ? ORDER BY id LIMIT ?", (after, _BATCH)
        ).fetchall():
            for row in rows:
                after = int(row[0])  # type: ignore[arg-type]
                yield after, self.load(after)

    def present(self) -> set[int]:
        """Those of current versions and of current eras of journals: what is left are the past's."""
        rows = self._execute(
            "SELECT recipe FROM version WHERE until IS NULL AND recipe IS NOT NULL "
            "UNION SELECT recipe FROM era WHERE ended IS NULL AND recipe IS NOT NULL"
        )
        return {row[0] for row in rows}
