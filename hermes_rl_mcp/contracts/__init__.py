"""The language all processes of a run share. Pydantic and the standard library only; no I/O."""
