"""How frameworks differentiate an operation: what is the same for all operations, in a module for each framework."""
