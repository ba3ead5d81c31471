"""`indexer_kl`: its options, checks, calls and doors; what it computes is in `numpy_backend/indexer.py`."""
