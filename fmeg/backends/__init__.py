"""Tables of primitive operations that have more than one implementation."""
