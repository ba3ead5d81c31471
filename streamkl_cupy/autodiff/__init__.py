"""How frameworks differentiate an operation, whichever it is: a module each, imported by the framework's own door."""
