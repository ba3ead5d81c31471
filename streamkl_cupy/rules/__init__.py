"""What varies from call to call by name, each a device header under `cuda_src/` and an entry here, its host half.

Everything else asks the entries: which header and which constants a kernel gets, what the NumPy backend computes on a
tile, what the float64 reference holds both against, what bad input is told.
"""
