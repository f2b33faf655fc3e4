"""The rules: one file per concern, each a function (state, now, policy) -> Decision or None."""
