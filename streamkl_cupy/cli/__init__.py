"""The command line: `python -m streamkl_cupy doctor | bench | compile`. One module per command."""
