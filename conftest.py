"""For every test and doctest."""

# tyro hashes what it finds in builtins when it is imported, and a doctest leaves its last result there as `_`.
import tyro  # noqa: F401
