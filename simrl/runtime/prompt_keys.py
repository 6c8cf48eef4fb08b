"""PromptKeys: the keys by which requests find each other's prompts in a prefix cache."""

from __future__ import annotations

from simrl.trace.sample import Sample


class PromptKeys:
    """The keys of one run's prompts, on either clock. In a `salted` cache a key holds for the
    groups that began under one version; in any other, for the run.

    A group begins when its first sample is submitted to a worker. `version` is the one of the
    weights requested last, set by workers that are to load it."""

    def __init__(self, salted: bool = False) -> None:
        self.version = 0
        self._salted = salted
        self._began: dict[tuple[int, int, int], int] = {}  # versions, by epoch, step and prompt
        self._keys: dict[tuple[int, int], int] = {}  # by prompt and version

    def salt(self, sample: Sample) -> int | None:
        """Return the version under which the sample's group began; None where nothing is
        salted."""
        if not self._salted:
            return None
        return self._began.setdefault((sample.epoch, sample.step, sample.prompt_id), self.version)

    def key(self, sample: Sample) -> int:
        """Return the key of a sample's prompt."""
        if (salt := self.salt(sample)) is None:
            return sample.prompt_id
        return self._keys.setdefault((sample.prompt_id, salt), len(self._keys))
