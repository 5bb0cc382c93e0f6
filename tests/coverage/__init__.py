"""Rows of other libraries' rotary functions and models, with what `patch` makes of them, and the code that measures them."""
