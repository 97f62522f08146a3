"""Every error a user of the product is meant to see.

::

    HermesRLError
    +- NotFoundError (LookupError)        an environment, field or run that is not there
    |  +- UnknownEnvironmentError         .available
    |  +- UnknownFieldError               .available_fields
    |  +- UnknownRunError                 .active_runs
    +- NotSelectedError                   a tool was called before rl_select_environment
    +- InvalidValueError (ValueError)     wrong type, out of range, does not fit the other values
    |  +- LockedFieldError                .locked_value
    |  +- RevisionConflictError           somebody else changed the session in between
    +- ConfirmationError                  a person has to say yes first      .question
    +- DeclinedError                      they were asked and did not say yes
    +- MissingExtraError                  an optional dependency is not installed; says the command
    +- PreflightError                     the run could not start: disk, data folder, model, port
    +- CeilingError                     the estimate of a run is beyond what the operator allows
    +- ResumeError                      a run cannot be continued: no complete checkpoint, or one that does not fit
    +- UnreadableRunError               the record of a run is damaged or from a later version
    +- EnvironmentFileError               an environment file cannot be loaded; quotes its error
    +- EndpointError                      an HTTP peer of the run answered wrongly or not at all

One sentence says what happened and what was found; ``hint`` says what to do next. ``payload`` is what a
tool result carries: ``error`` and the helper lists a program can use. Errors survive pickling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_NAME_CHARS = 200
"""Of a name that somebody asked for and that is not there."""


class HermesRLError(Exception):
    """Base of all errors above. ``details`` are the helper lists (``available``, ``active_runs``, ...)."""

    def __init__(self, message: str, *, hint: str = "", details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details: dict[str, Any] = dict(details or {})

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.hint, self.details))

    @property
    def payload(self) -> dict[str, Any]:
        """``{"error": sentence, ["hint": sentence,] **details}``."""
        hint = {"hint": self.hint} if self.hint else {}
        return {"error": self.message, **hint, **self.details}


def _rebuild(cls: type[HermesRLError], message: str, hint: str, details: dict[str, Any]) -> HermesRLError:
    error = cls.__new__(cls)
    HermesRLError.__init__(error, message, hint=hint, details=details)
    return error


class NotFoundError(HermesRLError, LookupError):
    """Something was named that does not exist."""


class UnknownEnvironmentError(NotFoundError):
    """No environment has this name or file stem."""

    def __init__(self, name: str, available: Sequence[str]) -> None:
        super().__init__(
            f"Environment '{name[:_NAME_CHARS]}' not found.",
            hint="Call rl_list_environments to see what there is.",
            details={"available": list(available)},
        )


class UnknownFieldError(NotFoundError):
    """The selected environment and the trainer have no such field."""

    def __init__(self, field: str, available_fields: Sequence[str]) -> None:
        super().__init__(
            f"Unknown field '{field[:_NAME_CHARS]}'.",
            hint="Call rl_get_current_config to see the fields and their meaning.",
            details={"available_fields": list(available_fields)},
        )


class UnknownRunError(NotFoundError):
    """No run directory has this id."""

    def __init__(self, run_id: str, active_runs: Sequence[str]) -> None:
        super().__init__(
            f"Run '{run_id[:_NAME_CHARS]}' not found.",
            hint="Call rl_list_runs to see all runs.",
            details={"active_runs": list(active_runs)},
        )


class NotSelectedError(HermesRLError):
    """A tool that needs a selected environment was called without one."""

    def __init__(self) -> None:
        super().__init__("No environment selected.", hint="Use rl_select_environment(name) first.")


class InvalidValueError(HermesRLError, ValueError):
    """A value of the wrong type or range, or one that does not fit the others."""


class LockedFieldError(InvalidValueError):
    """The operator's profile fixes this field."""

    def __init__(self, field: str, locked_value: Any) -> None:
        super().__init__(
            f"Field '{field}' is locked and cannot be changed.",
            hint="Only the person who starts the server can unlock it.",
            details={"locked_value": locked_value},
        )


class RevisionConflictError(InvalidValueError):
    """The session changed between reading and writing it."""


class ConfirmationError(HermesRLError):
    """A person has to say yes first; nothing was done."""

    def __init__(self, question: str) -> None:
        super().__init__(
            f"A person has to agree first; nothing was done. {question}",
            hint="Put the question to the person you work for. Only if they say yes, call again with the same "
            "arguments and confirm=true.",
            details={"question": question, "confirm": True},
        )

    @property
    def question(self) -> str:
        """What they are asked. The same for as long as the same would be done."""
        return str(self.details["question"])


class DeclinedError(HermesRLError):
    """A person was asked and did not say yes; nothing was done."""

    def __init__(self, how: str) -> None:
        super().__init__(
            f"The person was asked and {how}; nothing was done.",
            hint="Go on without it. Do not ask again unless they want it; in a shell they can do it themselves "
            "(hermes-rl runs, hermes-rl export).",
        )


class MissingExtraError(HermesRLError):
    """An optional part of the product is not installed in this Python."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(
            f"{what} needs packages that are not installed.",
            hint=f"Install them with: pip install 'hermes-rl-mcp[{extra}]'"
            + (" or, apart from everything else: hermes-rl install-atropos" if extra == "atropos" else ""),
            details={"extra": extra},
        )


class PreflightError(HermesRLError):
    """A check before the start of a run failed; nothing was started."""


class CeilingError(PreflightError):
    """The operator's ceiling of hours, disk or GPU memory is below the estimate; nothing was started."""


class ResumeError(PreflightError):
    """There is nothing to continue from, or it does not fit; nothing was started."""


class UnreadableRunError(HermesRLError):
    """The run is there, but its record cannot be read. Nothing was changed. ``status`` is its label in lists."""

    def __init__(self, run_id: str, reason: str, path: str, status: str = "unreadable") -> None:
        super().__init__(
            f"Run '{run_id}' cannot be read: {reason}.",
            hint="Try again." if status == "unknown" else f"Its files are untouched in {path}.",
            details={"run_id": run_id, "status": status},
        )


class EnvironmentFileError(HermesRLError):
    """An environment file could not be read, imported or described."""


class EndpointError(HermesRLError):
    """An HTTP endpoint of the run did not answer as its contract says."""
