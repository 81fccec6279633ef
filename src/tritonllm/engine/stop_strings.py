"""Where a growing text ends because a stop string has come."""

from __future__ import annotations


class StopStrings:
    """Cuts a text at the stop string that is complete first, however the text is split into pieces.

    Of several that are complete with the same character the longest counts. The end of the text is held back as long as
    a stop string may begin there.

    Args:
        stops: the strings, none of them empty.
        include: leave the stop string in the text.

    Attributes:
        found: the stop string that ended the text, None so far.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.found: str | None = None

    def add(self, piece: str, last: bool = False, may_stop: bool = True) -> str:
        """The text that is certain now; with `last`, all of it. Nothing comes after the stop string.

        A stop string that is complete with a piece that may not stop does not count.
        """
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = []
        for stop in self._stops if may_stop else ():
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))  # to be complete only now
            if start >= 0:
                ends.append((start + len(stop), -len(stop), stop))
        if ends:
            end, _, self.found = min(ends)
            self._held = ""
            return text[: end if self._include else end - len(self.found)]
        certain = len(text) if last else len(text) - self._num_open(text)
        self._held = text[certain:]
        return text[:certain]

    def _num_open(self, text: str) -> int:
        """Characters at the end of the text that a stop string may begin with."""
        longest = min(max(map(len, self._stops)) - 1, len(text))
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
