"""Arguments that several tools have, with their limits and their meaning for a model. No deferred annotations here
either: the SDK evaluates them."""

from typing import Annotated

from pydantic import Field

from hermes_rl_mcp.contracts.sections import LogName, SectionName
from hermes_rl_mcp.operations.context import MAX_WAIT_S

RunId = Annotated[str, Field(description="8 hex characters, from rl_start_training or rl_list_runs.")]
RunIdOrLatest = Annotated[
    str, Field(description="8 hex characters, from rl_start_training or rl_list_runs; 'latest' = the newest run.")
]
Wait = Annotated[
    float, Field(ge=0, le=MAX_WAIT_S, description="Wait up to so many seconds for news. 0 = answer at once.")
]
Include = Annotated[
    list[SectionName],
    Field(
        max_length=8,
        description="Parts to add. rollouts: scored completions; log: of one process; plot: PNG of reward, accuracy, "
        "length, loss; diagnosis: what is wrong, last log lines; events: changes of state.",
    ),
]
Process = Annotated[LogName, Field(description="Whose log.")]
Step = Annotated[int | None, Field(ge=1, description="Rollouts of this step alone.")]
PartOffset = Annotated[
    int,
    Field(ge=-1, description="First row (log: byte) of the parts. -1 = the newest; metrics spread over the run."),
]
PartLimit = Annotated[int, Field(ge=0, le=262_144, description="Rows (log: bytes) of each part. 0 = its default.")]
Offset = Annotated[int, Field(ge=0, description="Rows to skip: next_offset of the answer before.")]
Limit = Annotated[int, Field(ge=0, le=500, description="Rows at most. 0 = as many as fit.")]
