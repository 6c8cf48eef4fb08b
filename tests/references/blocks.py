"""KV blocks as vLLM keeps them: one ordered list of free blocks, names (vLLM's hashes) for full ones, and who uses which.

- New blocks are taken from the front of the list; a named one loses its name.
- Blocks are given back last first: unnamed ones go to the front of the list, named ones to its end, both in this order. So of
  what can be found again, the least recently used goes first, and the end of a text before its beginning.
- Several blocks may have one name. The one that got it first is found.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field


@dataclass
class Blocks:
    free: list[int]  # in the order in which they are taken
    users: dict[int, int] = field(default_factory=dict)
    name_of: dict[int, Hashable] = field(default_factory=dict)
    named: dict[Hashable, list[int]] = field(default_factory=dict)  # the first to be named first

    def find(self, names: Iterable[Hashable]) -> list[int]:
        """Return the blocks that have these names, up to the first name that none has."""
        found = []
        for name in names:
            if name not in self.named:
                break
            found.append(self.named[name][0])
        return found

    def unused(self, blocks: list[int]) -> int:
        """Return how many of some blocks are free."""
        return sum(block not in self.users for block in blocks)

    def use(self, found: list[int]) -> None:
        """Let one more request use blocks that were found."""
        for block in found:
            if block not in self.users:
                self.free.remove(block)
            self.users[block] = self.users.get(block, 0) + 1

    def take(self, number: int) -> list[int]:
        """Return new blocks."""
        taken, self.free = self.free[:number], self.free[number:]
        assert len(taken) == number
        for block in taken:
            self._unname(block)
            self.users[block] = 1
        return taken

    def name(self, block: int, name: Hashable) -> None:
        assert block not in self.name_of
        self.name_of[block] = name
        self.named.setdefault(name, []).append(block)

    def give_back(self, table: list[int]) -> None:
        """Let one request less use the blocks of its table."""
        unused = []
        for block in reversed(table):
            self.users[block] -= 1
            if self.users[block] == 0:
                del self.users[block]
                unused.append(block)
        front = [block for block in unused if block not in self.name_of]
        self.free = front + self.free + [block for block in unused if block in self.name_of]

    def forget(self) -> None:
        """Take all names away."""
        for block in list(self.name_of):
            self._unname(block)

    def _unname(self, block: int) -> None:
        if block in self.name_of:
            name = self.name_of.pop(block)
            self.named[name].remove(block)
            if not self.named[name]:
                del self.named[name]
