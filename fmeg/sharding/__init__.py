"""Logical axes, and what moves an array from one layout to another."""
