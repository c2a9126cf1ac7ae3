"""The planner: whether to compress and with what, before a run (``tersegrad plan``) and during one (``Auto``)."""
