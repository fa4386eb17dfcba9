"""From a shape to a plan: pure functions, no device, no state."""
