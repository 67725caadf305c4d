"""The interface between an optimizer and what makes its updates beside the step; `overlap` implements it."""

from __future__ import annotations

from typing import Protocol

# What an error says of updates that cannot be taken back.
BEGUN = "updates of this step have begun inside backward, without it: let updates begin after backward (early=False)"


class Deferral(Protocol):
    """Makes some of an optimizer's updates beside the caller."""

    def offer_all(self, scale: float) -> None:
        """Claims and starts its updates."""
        ...

    def skip(self) -> None:
        """Takes back the updates of this step that it can take back."""
        ...

    def finish(self) -> None:
        """Waits for its updates, and takes back those of which it is not decided yet whether they count."""
        ...
