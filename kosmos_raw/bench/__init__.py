"""Measurements: variants alternate in shuffled order on the same random data; medians are reported."""
