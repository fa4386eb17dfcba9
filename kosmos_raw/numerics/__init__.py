"""What is right: oracles in float64, and how far a result may be from them."""
