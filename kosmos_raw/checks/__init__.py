"""Runs an operator on fresh random data between poisoned buffers and judges it. `validate`, `demo` and tests use it."""
