"""How many answers the evaluation at the end of a run asks for: what the environment does, and what is said before."""

from __future__ import annotations

AUTO_SHARE = 0.1
"""Of the answers that the run samples anyway: both sides together take no more."""
AUTO_MOST = 200
"""Answers per side. By then the interval of a difference is about 0.1 to either side."""
AUTO_LEAST = 30
"""Fewer would leave nearly every change undetected."""
LEAST = 5
"""Fewer give no interval worth the name, also where they were asked for."""


def answers_wanted(eval_items: int, total_steps: int, batch_size: int) -> tuple[int, str]:
    """Answers per side, or 0 and the reason why there are none."""
    if eval_items == 0:
        return 0, "eval_items = 0"
    if eval_items > 0:
        return (
            (eval_items, "") if eval_items >= LEAST else (0, f"eval_items = {eval_items} is too few, from {LEAST} on")
        )
    affordable = int(AUTO_SHARE * max(0, total_steps) * max(0, batch_size) / 2)
    if affordable >= AUTO_LEAST:
        return min(affordable, AUTO_MOST), ""
    return 0, (
        f"the run is too short for it: a tenth of what its {total_steps} steps of {batch_size} answers sample allows "
        f"{affordable} items, and fewer than {AUTO_LEAST} say little. Set eval_items to have it all the same"
    )
