"""A matplotlib figure that a notebook shows, whatever backend is loaded there. The same figure gives the same bytes."""

from __future__ import annotations

import io

from matplotlib.figure import Figure


class Picture(Figure):
    """A `Figure` with no window and no global state: save it, or let a notebook show it."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()
