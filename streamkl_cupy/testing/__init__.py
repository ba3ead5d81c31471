"""What tests, benchmarks and users share to judge results: a dense float64 reference, problems by name, comparisons."""
