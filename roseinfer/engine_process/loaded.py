"""What is loaded when a server begins to serve, and stays until it ends."""

from __future__ import annotations

import gc


def keep_loaded() -> None:
    """Have garbage collection look at nothing any more that is there now.

    Libraries leave hundreds of thousands of objects, and what is made for tokens has all of them
    looked through again and again: that takes longer than all that is done for a token.
    """
    gc.collect()
    gc.freeze()
