"""One file an operator: check arguments, ask plan/, launch."""
