"""An MoE layer: what it is (config), and what a launch of it needs (sizes)."""
