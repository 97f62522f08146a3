"""What a teacher would have said in the policy's place: hints put into a context, candidates put onto tokens.

The teacher reads what the policy read and a hint besides, and is asked about the very tokens that the policy wrote.
Invariant: candidates lie only on tokens that the policy wrote, each on its own; where the teacher was not asked there
are none, which the trainer takes for "nothing to learn here", never for a probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hermes_rl_mcp.envs.scoring import TokenScore
from hermes_rl_mcp.envs.tokenizer import Renderer
from hermes_rl_mcp.envs.trajectory import ScoredDataItem

_PLACE = "the hint goes here"
_DIGITS = 5
"""Of a logprob; more would double what goes over the wire and mean nothing."""


def with_hint(renderer: Renderer, context_ids: Sequence[int], hint: str) -> list[int] | None:
    """The context of an assistant turn with ``hint`` at the end of the last message before it. All its other tokens
    stay as they are. None where the context does not end as the chat template ends a message."""
    tail = renderer.prompt([{"role": "user", "content": _PLACE}]).rpartition(_PLACE)[2]
    tail_ids = renderer.encode(tail)
    ids = list(context_ids)
    if tail_ids and ids[-len(tail_ids) :] == tail_ids:
        return ids[: -len(tail_ids)] + renderer.encode(hint) + tail_ids
    text = renderer.decode(ids, special=True)  # the end may share a token with what stands before it
    if tail and text.endswith(tail):
        return renderer.encode(text.removesuffix(tail) + hint + tail)
    return None


def candidates(score: TokenScore, most: int) -> list[tuple[int, float]]:
    """Up to ``most`` tokens and their logprobs: the likeliest, and the given one in any case."""
    top = score.top[:most]
    if all(token != score.token_id for token, _ in top):
        top = [*top[: most - 1], (score.token_id, score.logprob)]
    return [(token, round(logprob, _DIGITS)) for token, logprob in top]


@dataclass
class Teaching:
    """A teacher's candidates along one sequence of ``length`` tokens, none to begin with."""

    length: int
    places: dict[int, list[tuple[int, float]]] = field(default_factory=dict)

    def place(self, start: int, scores: Sequence[TokenScore], most: int) -> None:
        """``scores`` of the tokens from ``start`` on."""
        if not 0 <= start <= self.length - len(scores):
            raise ValueError(f"{len(scores)} scores from token {start} on do not fit {self.length} tokens")
        self.places |= {start + at: candidates(score, most) for at, score in enumerate(scores)}

    def put_into(self, scored: ScoredDataItem) -> ScoredDataItem:
        """``scored`` with the candidates; as it is where there are none."""
        if not self.places:
            return scored
        rows_T = [self.places.get(at, []) for at in range(self.length)]
        scored["distill_token_ids"] = [[token for token, _ in row] for row in rows_T]
        scored["distill_logprobs"] = [[logprob for _, logprob in row] for row in rows_T]
        return scored
