"""Which rotary functions and models of other libraries `patch` serves: rows, and what measures them again."""
